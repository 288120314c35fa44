"""Decoding through the loop: lossless, stopped where it should be, refilled, accounted for."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.batch import seat
from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import CapacityError, RequestError
from eagle3_jax.generation import generate
from eagle3_jax.loop import run
from eagle3_jax.loop.decode import DecodeStages
from eagle3_jax.testing import tiny_drafter, tiny_tokenizer, tiny_verifier
from eagle3_jax.verifier.decoder import check_tokens

LENGTHS = (3, 130, 17, 128, 129, 256, 1, 40)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(2, 64, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module", params=["deepseek", "llama"])
def pair(request):
    return tiny_verifier(request.param), tiny_drafter(request.param)


@pytest.fixture(scope="module")
def plain(pair, prompts):
    return generate(pair[0], None, prompts, max_new_tokens=40, rows=4)


def greedy_by_score(verifier, prompt, tokens):
    """The verifier's own choice at every position of prompt and continuation, in one pass."""
    text = jnp.asarray([prompt + tokens])
    return np.asarray(jnp.argmax(verifier.score(text, (1,)).logits[0], axis=-1))


def test_plain_decoding_is_the_verifiers_greedy_choice(pair, prompts, plain):
    for prompt, tokens in zip(prompts[:3], plain.tokens[:3], strict=True):
        best = greedy_by_score(pair[0], prompt, tokens)
        assert best[len(prompt) - 1 : -1].tolist() == tokens


@pytest.mark.parametrize("depth", [0, 2])
def test_no_array_of_the_state_is_empty(pair, depth):
    """jaxlib 0.11.2 crashes where it compiles a mapped loop that carries one."""
    drafter = pair[1] if depth else None
    stages = DecodeStages(verifier=pair[0], drafter=drafter, speculation=Speculation(depth=2))
    state = jax.eval_shape(lambda: stages.make_state(2, 128))
    assert min(x.size for x in jax.tree.leaves(state)) > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_speculative_equals_plain_token_for_token(pair, prompts, plain, rows):
    speculation = Speculation(depth=3)
    out = generate(pair[0], pair[1], prompts, max_new_tokens=40, rows=rows, speculation=speculation)
    assert out.tokens == plain.tokens


def test_a_text_stops_at_its_end_token_or_its_limit(pair, prompts, plain):
    """A token of the plain text made the end token: the text is cut behind its first place."""
    verifier, drafter = pair
    tokens = plain.tokens[2]
    end = tokens[11]
    config = dataclasses.replace(verifier.config, eos_tokens=(end,))
    graph_changed = jax.tree.map(lambda x: x, verifier)
    graph_changed.config = config
    out = generate(
        graph_changed,
        drafter,
        [prompts[2]],
        max_new_tokens=40,
        speculation=Speculation(depth=3),
    )
    assert out.tokens[0] == tokens[: tokens.index(end) + 1]
    short = generate(
        verifier, drafter, [prompts[2]], max_new_tokens=7, speculation=Speculation(depth=3)
    )
    assert short.tokens[0] == tokens[:7]


def test_accounting(pair, prompts):
    out = generate(
        pair[0], pair[1], prompts, max_new_tokens=40, rows=3, speculation=Speculation(depth=3)
    )
    stats = out.stats
    assert stats.new_tokens == sum(map(len, out.tokens))
    assert stats.cycles == sum(row.cycles for row in out.rows)
    assert stats.accept_length == pytest.approx((stats.new_tokens - len(prompts)) / stats.cycles)
    assert len(stats.acceptance_by_depth) == 3
    assert all(0 <= share <= 1 for share in stats.acceptance_by_depth)
    plain = generate(pair[0], None, prompts[:2], max_new_tokens=5)
    assert plain.stats.accept_length == 1.0
    assert plain.stats.acceptance_by_depth == ()


def test_a_perfect_drafter_is_accepted_to_the_full_depth(pair, prompts):
    """Told the verifier's own continuation, the loop accepts every node: depth + 1 a cycle."""
    verifier = pair[0]
    told = tuple(generate(verifier, None, [prompts[2]], max_new_tokens=40).tokens[0])
    family = "deepseek" if verifier.config.latent else "llama"
    drafter = tiny_drafter(family, draft_vocab_size=64)

    @dataclasses.dataclass(frozen=True)
    class Told:
        """Draft the known continuation: the chooser is told how long the text is by the state."""

        at: int

        def __call__(self, logits, depth):
            token = jnp.asarray(told)[jnp.minimum(self.at + depth, len(told) - 1)]
            return jnp.broadcast_to(token, logits.shape[:2]).astype(jnp.int32)

    stages = DecodeStages(
        verifier=verifier, drafter=drafter, speculation=Speculation(depth=4), choose=Told(0)
    )
    state = seat(stages, stages.make_state(1, 512), 0, prompts[2], 40)
    state = run(stages, state, jnp.asarray(1, jnp.int32))
    assert state.accepted[0].tolist() == [1, 1, 1, 1]
    assert int(state.end[0]) == len(prompts[2]) + 1 + 5
    stages = dataclasses.replace(stages, choose=Told(5))
    state = run(stages, state, jnp.asarray(1, jnp.int32))
    assert state.accepted[0].tolist() == [2, 2, 2, 2]
    text = state.tokens[0, len(prompts[2]) : int(state.end[0])]
    assert text.tolist() == list(told[: len(text)])


def test_requests_that_cannot_be_served_are_refused_before_anything_runs(pair):
    verifier, drafter = pair
    with pytest.raises(RequestError, match="empty"):
        generate(verifier, drafter, [[]])
    with pytest.raises(RequestError, match="no prompts"):
        generate(verifier, drafter, [])
    with pytest.raises(RequestError, match="outside the verifier's vocabulary of 64"):
        generate(verifier, drafter, [[5, 64]])
    with pytest.raises(RequestError, match="whole numbers; found float64"):
        check_tokens(np.asarray([5.7, 6.2]), 64)
    with pytest.raises(RequestError, match="tokenizer"):
        generate(verifier, drafter, ["text"])
    with pytest.raises(CapacityError, match="need a capacity of 512"):
        generate(verifier, drafter, [[5] * 200], max_new_tokens=100, capacity=256)
    with pytest.raises(CapacityError, match="multiple of 256"):
        generate(verifier, drafter, [[5] * 200], max_new_tokens=10, capacity=300)
    with pytest.raises(CapacityError, match="longest text of 4096"):
        generate(verifier, drafter, [[5] * 4000], max_new_tokens=100)
    tree = Speculation(depth=2, topk=12, nodes=20)
    with pytest.raises(RequestError, match="topk 12 passes the drafter's vocabulary of 9"):
        generate(verifier, tiny_drafter("llama", draft_vocab_size=9), [[5]], speculation=tree)
    for sampling, said in (
        (Sampling(stop=("x",)), "stop texts need a tokenizer"),
        (Sampling(stop_tokens=(64,)), r"\[64\] outside the vocabulary of 64"),
        (Sampling(logit_bias=((-1, 1.0),)), r"\[-1\] outside the vocabulary of 64"),
        ([Sampling()] * 2, "2 samplings were given for 1 prompts"),
        (Sampling(min_new_tokens=9), "max_new_tokens 8 is below sampling min_new_tokens 9"),
    ):
        with pytest.raises(RequestError, match=said):
            generate(verifier, drafter, [[5]], max_new_tokens=8, sampling=sampling)


MIXED = [
    Sampling(temperature=1.0, seed=11),
    Sampling(temperature=0.7, seed=12, top_k=5),
    Sampling(),
    Sampling(temperature=2.0, seed=13, top_p=0.8),
    Sampling(temperature=1.3, seed=14, min_p=0.1),
    Sampling(temperature=1.0, seed=15, repetition_penalty=1.5),
    Sampling(temperature=2.0, seed=16, min_new_tokens=20, stop_tokens=tuple(range(2, 33))),
    Sampling(temperature=2.0, seed=17, logit_bias=((7, -50.0), (3, 2.0)), max_new_tokens=9),
]
FORMS = {
    "chain": Speculation(depth=2),
    "tree": Speculation(depth=2, topk=8, nodes=12),
    "sampled chain": Speculation(depth=2, sampled=True),
    "sampled tree": Speculation(depth=2, topk=8, nodes=12, sampled=True),
}
ALONE = {"tree": 5, "sampled tree": 6}
"""Which of the rows is decoded alone; a chain's texts are plain decoding's anyway."""


def mix(form: str | None, order: Sequence[int] = range(8), rows=8, logprobs=True):
    """Rows with a setting each, by one of the forms or plainly."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(2, 64, n).tolist() for n in (3, 60, 17, 1, 129, 8, 5, 30)]
    drafter = None if form is None else tiny_drafter("llama", draft_vocab_size=50)
    return texts, generate(
        tiny_verifier("llama"),
        drafter,
        [texts[i] for i in order],
        max_new_tokens=24,
        rows=rows,
        capacity=512,
        speculation=FORMS.get(form or "", Speculation(depth=0)),
        sampling=[MIXED[i] for i in order],
        logprobs=logprobs,
    )


@pytest.fixture(scope="module")
def mixed_plain():
    return mix(None)[1]


@pytest.mark.parametrize("form", FORMS)
def test_rows_with_their_own_sampling(form, mixed_plain):
    texts, out = mix(form)
    assert any(any(row.drafted) for row in out.rows)
    if form in ("chain", "tree"):
        assert out.tokens == mixed_plain.tokens
    assert out.tokens[2] == mixed_plain.tokens[2]  # the greedy row, whatever the others draw

    # In any place, and alone in a program compiled for it.
    order = [4, 1, 7, 0, 6, 2, 5, 3]
    assert mix(form, order)[1].tokens == [out.tokens[i] for i in order]
    if (alone := ALONE.get(form)) is not None:
        assert mix(form, [alone], 1, logprobs=False)[1].tokens == [out.tokens[alone]]

    # Limits, end tokens, biases.
    late, short = out.tokens[6], out.tokens[7]
    ends = {1, *MIXED[6].stop_tokens}
    assert 20 < len(late) <= 24 and not ends & set(late[:20]) and ends & set(late[20:])
    assert len(short) == 9 and 7 not in short

    # Log-probabilities are the verifier's own, before everything that a sampling changes.
    both = [text + row.tokens for text, row in zip(texts, out.rows, strict=True)]
    padded = np.zeros((8, 160), np.int32)
    for i, text in enumerate(both):
        padded[i, : len(text)] = text
    scores = tiny_verifier("llama").score(jnp.asarray(padded), (1,)).logits
    own = np.asarray(jax.nn.log_softmax(scores, axis=-1))
    for i, (text, row) in enumerate(zip(texts, out.rows, strict=True)):
        at = np.arange(len(text) - 1, len(both[i]) - 1)
        np.testing.assert_allclose(np.asarray(row.logprobs), own[i, at, row.tokens], atol=2e-5)


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations counts are from what is expected."""
    few = expected < 5
    found = np.append(found[~few], found[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    value = ((found - expected) ** 2 / expected).sum()
    return (value - len(found) + 1) / (2 * len(found) - 2) ** 0.5


def test_equal_prompts_under_one_sampling_are_independent_draws():
    verifier, prompt, temperature = tiny_verifier("llama"), [5, 9, 30], 1.5
    out = generate(
        verifier,
        tiny_drafter("llama"),
        [prompt] * 256,
        max_new_tokens=8,
        rows=256,
        capacity=256,
        speculation=Speculation(depth=2, sampled=True),
        sampling=Sampling(temperature=temperature, seed=5, min_new_tokens=8),
    )
    assert sum(sum(row.drafted) for row in out.rows) > 256
    texts = np.asarray(out.tokens)
    assert len({tuple(text) for text in out.tokens}) == 256
    logits = np.array(verifier.score(jnp.asarray([prompt]), (1,)).logits[0, -1])
    logits[1] = -np.inf
    p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    assert chi_square(np.bincount(texts[:, 0], minlength=64), 256 * p) < 4
    # The same token in the same place of two texts, neighbours or not: no more than by chance.
    for place in range(2):
        for apart in (1, 2, 128):
            same = (texts[:, place] == np.roll(texts[:, place], apart)).mean()
            share = np.bincount(texts[:, place], minlength=64) / 256
            chance = (share**2).sum()
            assert abs(same - chance) < 5 * (chance / 256) ** 0.5


def zigzag(scores, text, length):
    """A tiny grammar: even and odd tokens in turn, and never token 7."""
    last = jnp.take_along_axis(text, length[:, None] - 1, axis=1)
    ids = jnp.arange(scores.shape[1])[None]
    return jnp.where((ids % 2 != last % 2) & (ids != 7), scores, -jnp.inf)


def test_a_grammar_is_held_along_every_path():
    prompts = [[5, 9, 30], [4, 6], [11]]
    out = generate(
        tiny_verifier("llama"),
        tiny_drafter("llama", draft_vocab_size=50),
        prompts,
        max_new_tokens=40,
        rows=3,
        speculation=FORMS["sampled tree"],
        sampling=[Sampling(temperature=2.0, min_new_tokens=40)] * 2 + [Sampling()],
        logits_processor=zigzag,
    )
    assert sum(sum(row.drafted) for row in out.rows) > 10
    for prompt, tokens in zip(prompts, out.tokens, strict=True):
        text = np.asarray(prompt[-1:] + tokens)
        assert (text[1:] % 2 != text[:-1] % 2).all() and 7 not in text


def test_a_stop_text_cuts_text_and_tokens(prompts):
    verifier = jax.tree.map(lambda x: x, tiny_verifier("llama"))
    verifier.tokenizer = tiny_tokenizer()
    how: dict = {"max_new_tokens": 30, "capacity": 256}
    whole = generate(verifier, None, [prompts[2]], **how).rows[0]
    assert whole.text is not None
    stop = whole.text[10:13]
    at = whole.text.index(stop)
    row = generate(verifier, None, [prompts[2]], sampling=Sampling(stop=("??", stop)), **how).rows[
        0
    ]
    assert row.text == whole.text[:at]
    assert row.tokens == whole.tokens[: at + 3]
