"""Processed distributions: transformers' own figures, thresholds against sorts, rows alone."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.configs import Sampling
from eagle3_jax.forest import processing
from eagle3_jax.forest.processing import (
    FEW_KEPT,
    SPAN,
    Plan,
    RowSettings,
    adjusted,
    draw,
    one_setting,
    plan_of,
    weights_of,
)

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "processing.npz")
CASES = json.loads(str(GOLDEN["cases"]))
B, V = 4, 37
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.7, top_k=5, repetition_penalty=1.3, logit_bias=((3, 2.5), (3, 0.5))),
    Sampling(temperature=1.2, top_p=0.8, min_new_tokens=9, stop_tokens=(4, 30)),
    Sampling(temperature=1.0, min_p=0.2),
]


@functools.partial(jax.jit, static_argnames=("plan", "eos"))
def weights_from(logits, settings, plan, eos, length, seen):
    """Scores through both halves of the processing."""
    scores = adjusted(logits, settings, plan, eos, length, seen)
    return weights_of(scores, settings, plan)


def settings_of(samplings, plan: Plan, v: int = V, length: int = 3) -> RowSettings:
    """One row for each sampling."""
    rows = [one_setting(s, jax.random.key(0), length, v, plan) for s in samplings]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *rows)


def weights(samplings, logits, plan: Plan | None = None, eos=(), length=3, prompts=((),)):
    """Weights of rows whose prompts have `length` tokens, and whose texts are the prompts'."""
    plan = plan or plan_of(samplings)
    seen = np.zeros(logits.shape, bool)
    for row, text in enumerate(prompts):
        seen[row, list(text)] = True
    size = jnp.full((len(logits),), max(map(len, prompts)) or length, jnp.int32)
    settings = settings_of(samplings, plan, logits.shape[1], length)
    return np.asarray(weights_from(jnp.asarray(logits), settings, plan, eos, size, seen))


def normalised(x):
    x = x.astype(np.float64)
    return x / x.sum(axis=-1, keepdims=True)


def sampling_of(case, stops: bool) -> Sampling:
    """A golden case's; its end tokens are the model's, or the request's own."""
    values = {**case, "logit_bias": tuple(map(tuple, case.get("logit_bias", ())))}
    eos = tuple(values.pop("eos", ()))
    return Sampling(**values, stop_tokens=eos if stops else ())


@pytest.mark.parametrize("i", range(len(CASES)), ids=[f"{n} {c}" for n, c in CASES])
def test_distributions_are_transformers_own(i):
    name, case = CASES[i]
    logits, prompts = GOLDEN[f"{name}_scores"], GOLDEN[f"{name}_prompts"]
    before = prompts.shape[1] - int(GOLDEN["new"])
    sampling = [sampling_of(case, stops=False)] * len(logits)
    found = weights(sampling, logits, None, tuple(case.get("eos", ())), before, prompts)
    wanted = GOLDEN[f"p{i}"]
    np.testing.assert_array_equal(found > 0, wanted > 0)
    np.testing.assert_allclose(normalised(found), wanted, rtol=0, atol=1e-6)


def test_all_cases_side_by_side_are_transformers_own():
    """Every row has other settings, and the program is compiled for all of them."""
    few = [i for i, (name, _) in enumerate(CASES) if name == "few"]
    samplings = [sampling_of(CASES[i][1], stops=True) for i in few for _ in range(3)]
    plan = plan_of(samplings)
    assert plan.most_kept > FEW_KEPT and plan.minimum and plan.bias and plan.penalty
    logits = np.concatenate([GOLDEN["few_scores"]] * len(few))
    prompts = np.concatenate([GOLDEN["few_prompts"]] * len(few))
    before = prompts.shape[1] - int(GOLDEN["new"])
    found = normalised(weights(samplings, logits, plan, (), before, prompts))
    wanted = np.concatenate([GOLDEN[f"p{i}"] for i in few])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def random_scores(seed: int, ties: bool = False, v: int = V) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, v), scale=3).astype(np.float32)
    return np.round(x) if ties else x


seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("most", [32, 64])
@given(seed=seeds, ties=st.booleans(), k=st.lists(st.integers(1, 32), min_size=B, max_size=B))
def test_the_kth_score_is_the_sorts(most, seed, ties, k):
    """By taking out the greatest (32), and by bisection (64, over the vocabulary's size)."""
    scores = random_scores(seed, ties)
    scores[0, :20] = -np.inf
    scores[1, 3] = -0.0
    k = np.asarray(k)
    k[3] = V  # off
    found = np.asarray(kth(jnp.asarray(scores), jnp.asarray(k, jnp.int32), most))[:, 0]
    wanted = np.take_along_axis(np.sort(scores, axis=1), V - k[:, None], axis=1)[:, 0]
    np.testing.assert_array_equal(found[:3], wanted[:3])
    assert (scores[3] >= found[3]).all()


kth = jax.jit(processing._kth, static_argnames=("most",))
nucleus = jax.jit(processing._nucleus)


@given(seed=seeds, top_p=st.lists(st.floats(0.0625, 0.9375, width=32), min_size=B, max_size=B))
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(seed, top_p):
    rng = np.random.default_rng(seed)
    # Whole multiples of a power of two, so that no order of summing rounds.
    x = (rng.integers(1, 1025, (B, V)) ** rng.integers(1, 3, (B, 1)) / 2.0**20).astype(np.float32)
    x[:, :5] = 0.0
    top_p = np.asarray([*top_p[:3], 1.0], np.float32)
    kept = x >= np.asarray(nucleus(jnp.asarray(x), jnp.asarray(top_p)))
    most = top_p * x.sum(axis=1)
    for row in range(3):
        above = np.asarray([x[row, x[row] > y].sum() for y in x[row]])
        np.testing.assert_array_equal(kept[row], above < most[row])
        least = x[row, kept[row]].min()
        assert x[row, kept[row]].sum() >= most[row] > x[row, x[row] > least].sum()
    assert kept[3].all()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_settings_that_are_off_change_no_bit(temperature):
    logits = random_scores(0)
    samplings = [Sampling(temperature=temperature)] * B
    full = Plan(True, 64, True, True, True, True, True, 2)
    few = Plan(True, 32, True, True, True, True, True, 2)
    text = [range(5)] * B
    wanted = weights(samplings, logits, Plan(drawn=True))
    np.testing.assert_array_equal(weights(samplings, logits, full, (1,), 3, text), wanted)
    np.testing.assert_array_equal(weights(samplings, logits, few, (1,), 3, text), wanted)


@given(seed=seeds, order=st.permutations(range(B)))
def test_a_row_has_its_weights_alone_and_among_others_in_any_place(seed, order):
    logits, texts = random_scores(seed), [[1, 2, 3], [4, 5], [6], [3, 3, 9]]
    plan, order = plan_of(SETTINGS), list(order)
    together = weights(
        [SETTINGS[i] for i in order], logits[order], plan, (1,), 3, [texts[i] for i in order]
    )
    for place, i in enumerate(order):
        alone = weights([SETTINGS[i]], logits[i : i + 1], plan, (1,), 3, [[*texts[i], texts[i][0]]])
        np.testing.assert_array_equal(alone[0], together[place])


@given(seed=seeds, ties=st.booleans())
def test_excluded_tokens_have_no_weight_and_some_token_has(seed, ties):
    logits = random_scores(seed, ties)
    out = np.random.default_rng(seed).random((B, V)) < 0.5
    out[:, seed % V] = False
    logits[out] = -np.inf
    found = weights(SETTINGS, logits, None, (1,), 3, [range(3)] * B)
    assert not found[out].any() and np.isfinite(found).all() and (found.sum(axis=1) > 0).all()
    # The second row's end tokens are allowed, the third's are not yet.
    assert not found[2, [1, 4, 30]].any()


@given(seed=seeds)
def test_a_greedy_row_has_one_weight_at_the_first_likeliest(seed):
    logits = random_scores(seed, ties=True)
    found = weights([SETTINGS[0]] * B, logits, plan_of(SETTINGS))
    np.testing.assert_array_equal(found, np.eye(V)[np.argmax(logits, axis=1)])


def test_equal_scores_are_kept_together():
    """Where transformers would cut among them by the order of a sort."""
    logits = np.zeros((1, V), np.float32)
    logits[0, :4] = [3, 2, 2, 1]
    two = weights([Sampling(temperature=1.0, top_k=2)], logits)
    half = weights([Sampling(temperature=1.0, top_p=0.3)], logits)
    assert np.flatnonzero(two).tolist() == np.flatnonzero(half).tolist() == [0, 1, 2]


@given(seed=seeds, uniform=st.floats(0, 1, exclude_max=True, width=32))
def test_draws_across_spans_invert_the_cumulative_weights(seed, uniform):
    rng = np.random.default_rng(seed)
    v = 2 * SPAN + 88
    x = rng.integers(1, 100, (B, v)).astype(np.float32)
    x[:, rng.random(v) < 0.5] = 0.0
    x[0, SPAN : 2 * SPAN] = 0.0  # a whole span without weight
    x[1] = 0.0
    x[1, seed % v] = 1e-30
    found = np.asarray(jax.jit(draw)(jnp.asarray(x), jnp.full((B,), uniform, jnp.float32)))
    total = np.cumsum(x, axis=1)
    # Whole numbers: exact, as long as the product with the uniform number is not close to one.
    wanted = [np.searchsorted(c, np.float32(uniform) * c[-1], side="right") for c in total]
    assert found[1] == seed % v
    assert (x[np.arange(B), found] > 0).all()
    for row in (0, 2, 3):
        if abs((target := uniform * float(total[row, -1])) - round(target)) > 0.01:
            assert found[row] == wanted[row]


def test_the_plan_counts_what_some_row_asks_for():
    assert plan_of([Sampling()]) == Plan() and Plan().plainly_greedy
    assert plan_of([]) == Plan()
    found = plan_of(SETTINGS, logprobs=True)
    assert found == Plan(True, 8, True, True, True, True, True, 2, True)
    assert [plan_of([Sampling(top_k=k)]).most_kept for k in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    for asked in (
        Sampling(temperature=0.5),
        Sampling(repetition_penalty=1.1),
        Sampling(logit_bias=((1, 1.0),)),
        Sampling(min_new_tokens=1),
    ):
        assert not plan_of([asked]).plainly_greedy
    # Thresholds never take the likeliest away, and a stop token is no matter of choice.
    plain = Sampling(top_k=3, top_p=0.5, min_p=0.1, stop_tokens=(4,), max_new_tokens=3)
    assert plan_of([plain]).plainly_greedy


def test_a_row_of_settings():
    plan = plan_of(SETTINGS)
    one = settings_of([SETTINGS[1], SETTINGS[2]], plan, length=7)
    assert one.bias is not None and one.bias[0, 3] == 3.0 and not one.bias[1].any()
    assert one.stops.tolist() == [[-1, -1], [4, 30]]
    assert one.floor.tolist() == [7, 16] and one.top_k.tolist() == [5, V]


def test_a_hook_sees_the_text_and_what_was_done_to_the_scores():
    def hook(scores, text, length):
        last = jnp.take_along_axis(text, length[:, None] - 1, axis=1)
        return jnp.where(jnp.arange(scores.shape[1])[None] == last, -jnp.inf, scores + 1.0)

    biased = [Sampling(logit_bias=((5, 2.0),))] * 2
    plan = plan_of(biased, hook=hook)
    assert not plan.plainly_greedy
    text, length = jnp.asarray([[6, 8, 9], [6, 8, 9]]), jnp.asarray([2, 3])
    settings = settings_of(biased, plan)
    scores = np.asarray(adjusted(jnp.zeros((2, V)), settings, plan, (), length, None, text))
    assert [np.flatnonzero(np.isinf(row)).tolist() for row in scores] == [[8], [9]]
    assert (scores[:, 5] == 3.0).all()
