"""The property the design pays for: learning and decoding are one drafter, node for node."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle3_jax.drafter.drafter as drafter_module
from eagle3_jax.batch import seat
from eagle3_jax.configs import Speculation
from eagle3_jax.contracts import VerifierFeatures
from eagle3_jax.loop import run
from eagle3_jax.loop.decode import DecodeStages
from eagle3_jax.loop.learn import chain_logits
from eagle3_jax.states import arrays_of
from eagle3_jax.testing import tiny_drafter, tiny_verifier
from tests.naive_drafter import NaiveDrafter

CAPACITY = 512
LENGTH = 160  # one compiled shape of the learning path for every text
TOLERANCE = 2e-5


def off_likeliest(logits, depth):
    """A chooser that is not the greedy one, so that the drafted text is any text."""
    return jax.lax.top_k(logits, 3)[1][..., 2].astype(jnp.int32)


def greedy(logits, depth):
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@functools.cache
def drafter_of(family, flags=()):
    """A tiny drafter with some flags on; its norms' weights are drawn too, so that they show."""
    shared = tiny_drafter(family, **dict.fromkeys(flags, True))
    drafter = jax.tree.map(lambda x: x, shared)
    rng = np.random.default_rng(7)
    for path, variable in nnx.to_flat_state(nnx.state(drafter, nnx.Param)):
        if path[-1] == "weight":
            drawn = 1 + 0.2 * rng.standard_normal(variable.shape)
            variable[...] = jnp.asarray(drawn, jnp.float32)
    return drafter


@functools.cache
def stages_of(family, depth, choose, flags=()) -> Any:
    return DecodeStages(
        verifier=tiny_verifier(family),
        drafter=drafter_of(family, flags),
        speculation=Speculation(depth=depth),
        choose=choose,
    )


@jax.jit
def draft(stages, state):
    return stages.draft(state)


@functools.partial(jax.jit, static_argnames="steps")
def learned(drafter, verifier, features, tokens, steps):
    starts = jnp.zeros_like(tokens)
    return jnp.stack(chain_logits(drafter, verifier, features, tokens, starts, steps))


def decoded(stages, prompts, cycles):
    """A decoding state after some cycles, and the forest it drafts next."""
    state = stages.make_state(len(prompts), CAPACITY)
    for row, prompt in enumerate(prompts):
        state = seat(stages, state, row, prompt, 100)
    state = run(stages, state, jnp.asarray(cycles, jnp.int32))
    return draft(stages, state)


def texts_of(state, forest):
    """Each row's text with the drafted chain at its end, padded to LENGTH, and its root."""
    out = []
    for row in range(state.tokens.shape[0]):
        length = int(state.length[row])
        text = np.zeros(LENGTH, np.int32)
        text[: length + 1] = np.asarray(state.tokens[row, : length + 1])
        nodes = np.asarray(forest.tokens[row, 1:])
        text[length + 1 : length + 1 + len(nodes)] = nodes
        out.append((text, length - 1))
    return out


EAGLE31 = ("fc_norm", "norm_output")
GPT_OSS = ("norm_before_fc", "norm_before_residual")
MOST = ("fc_norm", "norm_before_residual", "norm_output", "qk_norm")

# Each costs its own compilations; every flag is among them, on and off.
CONFIGURATIONS = [
    ("deepseek", 4, off_likeliest, ()),
    ("deepseek", 1, greedy, EAGLE31),
    ("llama", 3, greedy, MOST),
    ("llama", 2, off_likeliest, GPT_OSS),
]


@given(
    configuration=st.sampled_from(CONFIGURATIONS),
    lengths=st.tuples(st.integers(1, 140), st.integers(1, 140)),
    cycles=st.integers(0, 3),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=25, deadline=None)
def test_learning_equals_decoding_node_for_node(configuration, lengths, cycles, seed):
    stages = stages_of(*configuration)
    depth = stages.depth
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 64, n).tolist() for n in lengths]
    state, forest = decoded(stages, prompts, cycles)
    for row, (text, root) in enumerate(texts_of(state, forest)):
        tokens = jnp.asarray(text[None])
        features = stages.verifier.score(tokens, stages.drafter.spec.boundaries).features
        logits = learned(stages.drafter, stages.verifier, features, tokens, depth)
        np.testing.assert_allclose(forest.logits[row], logits[:, 0, root], atol=TOLERANCE)


def learning_matches_the_oracle(flags=()):
    """`chain_logits` against the naive float64 drafter, at every root and step."""
    verifier, drafter = tiny_verifier("deepseek"), drafter_of("deepseek", flags)
    tokens = jax.random.randint(jax.random.key(5), (1, 20), 2, 64)
    features = verifier.score(tokens, drafter.spec.boundaries).features
    logits = jnp.stack(chain_logits(drafter, verifier, features, tokens, jnp.zeros_like(tokens), 4))
    oracle = NaiveDrafter(arrays_of(drafter), drafter.config, verifier.embedding[...])
    for root in range(0, 15):
        wanted, _ = oracle.chain(np.asarray(features.array[0]), np.asarray(tokens[0]), root, 4)
        np.testing.assert_allclose(logits[:, 0, root], wanted, atol=TOLERANCE)


def decoding_matches_the_oracle(flags=()):
    """The compiled loop's drafted tokens and logits against the naive drafter's own chain."""
    stages = stages_of("deepseek", 4, greedy, flags)
    oracle = NaiveDrafter(
        arrays_of(stages.drafter), stages.drafter.config, stages.verifier.embedding[...]
    )
    state = stages.make_state(1, CAPACITY)
    state = seat(stages, state, 0, list(range(5, 22)), 100)
    state, forest = jax.jit(lambda stages, state: stages.draft(state))(stages, state)
    length = int(state.length[0])
    text = np.asarray(state.tokens[:, : length + 1])
    features = stages.verifier.score(jnp.asarray(text), stages.drafter.spec.boundaries).features
    wanted, chosen = oracle.chain(np.asarray(features.array[0]), text[0], length - 1, 4, True)
    np.testing.assert_allclose(forest.logits[0], wanted, atol=TOLERANCE)
    assert forest.tokens[0, 1:].tolist() == chosen


@pytest.mark.parametrize("flags", [(), GPT_OSS, MOST], ids=["none", "gpt_oss", "most"])
def test_learning_matches_the_oracle(flags):
    learning_matches_the_oracle(flags)


@pytest.mark.parametrize("flags", [(), MOST], ids=["none", "most"])
def test_decoding_matches_the_oracle(flags):
    decoding_matches_the_oracle(flags)


def test_rope_shifted_in_the_shared_step_fails_learning_and_decoding(monkeypatch):
    right = drafter_module.node_positions
    monkeypatch.setattr(drafter_module, "node_positions", lambda r, d: right(r, d) + 1)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        learning_matches_the_oracle()
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        decoding_matches_the_oracle()


def test_documents_packed_together_are_learned_as_if_alone():
    verifier, drafter = tiny_verifier("deepseek"), tiny_drafter("deepseek")
    tokens = jax.random.randint(jax.random.key(6), (1, 24), 2, 64)
    cut = 9
    starts = jnp.where(jnp.arange(24) < cut, 0, cut)[None].astype(jnp.int32)
    spec = verifier.spec(drafter.spec.boundaries)

    def features_of(tokens):
        return verifier.score(tokens, spec.boundaries).features.array

    alone = jnp.concatenate([features_of(tokens[:, :cut]), features_of(tokens[:, cut:])], axis=1)
    packed = chain_logits(
        drafter, verifier, VerifierFeatures(array=alone, spec=spec), tokens, starts, 3
    )
    second = chain_logits(
        drafter,
        verifier,
        VerifierFeatures(array=alone[:, cut:], spec=spec),
        tokens[:, cut:],
        jnp.zeros((1, 24 - cut), jnp.int32),
        3,
    )
    for step in range(3):
        inside = 24 - cut - 1 - step
        np.testing.assert_allclose(
            packed[step][0, cut : cut + inside], second[step][0, :inside], atol=TOLERANCE
        )


def test_stages_are_pytrees_that_survive_replace():
    stages = stages_of("llama", 2, greedy)
    assert dataclasses.replace(stages, choose=off_likeliest).choose is off_likeliest
