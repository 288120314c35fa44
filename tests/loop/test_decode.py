"""Decoding through the loop: lossless, stopped where it should be, refilled, accounted for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import CapacityError, RequestError, UnsupportedError
from eagle3_jax.generation import generate, seat
from eagle3_jax.loop import run
from eagle3_jax.loop.decode import DecodeStages
from eagle3_jax.testing import tiny_drafter, tiny_verifier
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
    with pytest.raises(UnsupportedError, match="topk 2"):
        Speculation(topk=2)
    with pytest.raises(UnsupportedError, match="temperature 0.5"):
        Sampling(temperature=0.5)
