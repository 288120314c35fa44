"""Parity with speculators: every flag, by the functions that learning and decoding run.

The golden files say what its Eagle3DraftModel computes; see tests/golden/README.md.
"""

import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.caches import Rows, block_scope, causal, write_rows
from eagle3_jax.configs import DrafterConfig, RopeConfig
from eagle3_jax.contracts import DraftHidden, FeatureSpec, VerifierFeatures
from eagle3_jax.drafter import Drafter
from eagle3_jax.drafter.drafter import Roots, context_pass
from eagle3_jax.drafter.vocabulary import check_vocabulary, from_offsets
from eagle3_jax.forest.growth import grow_chain
from eagle3_jax.loop.learn import chain_logits
from eagle3_jax.states import fill
from eagle3_jax.testing import tiny_verifier
from eagle3_jax.verifier import Verifier

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = runpy.run_path(str(GOLDEN / "tiny_drafters.py"))
NAMES = sorted(path.stem for path in (GOLDEN / "drafters").glob("*.npz"))
TOLERANCE = 2e-5
ROUTES = ("first step", "recurrent", "training-time test")

# Our names of speculators' tensors; several are one array side by side.
KERNELS = {
    "fusion.kernel": ["fc"],
    "qkv.kernel": [f"layers.0.self_attn.{x}_proj" for x in "qkv"],
    "o.kernel": ["layers.0.self_attn.o_proj"],
    "mlp.gate_up.kernel": ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"],
    "mlp.down.kernel": ["layers.0.mlp.down_proj"],
    "head.kernel": ["lm_head"],
}
NORMS = {
    "input_norm": "input_norm",
    "embedding_norm": "layers.0.input_layernorm",
    "hidden_norm": "layers.0.hidden_norm",
    "q_norm": "layers.0.self_attn.q_norm",
    "k_norm": "layers.0.self_attn.k_norm",
    "mlp_norm": "layers.0.post_attention_layernorm",
    "norm": "norm",
}


def arrays_of(name: str) -> dict[str, np.ndarray]:
    """A drafter's arrays by our paths."""
    theirs = TINY["tensors"](name)
    arrays = {
        ours: np.concatenate([theirs[f"{part}.weight"] for part in parts]).T
        for ours, parts in KERNELS.items()
    }
    for ours, one in NORMS.items():
        if f"{one}.weight" in theirs:
            arrays[f"{ours}.weight"] = theirs[f"{one}.weight"]
    each = [value for key, value in sorted(theirs.items()) if key.startswith("fc_norm.")]
    if each:
        arrays["fc_norm.weight"] = np.stack(each)
    whole = np.zeros(TINY["VOCABULARY"], np.int64)
    arrays["vocabulary"] = from_offsets(theirs.get("d2t", whole))
    return arrays


def drafter_of(name: str) -> Drafter:
    """A golden drafter."""
    rope = RopeConfig(theta=TINY["ROPE_THETA"])
    if "llama3" in TINY["CONFIGS"][name]:
        scaling = TINY["LLAMA3"]
        rope = RopeConfig(
            theta=TINY["ROPE_THETA"],
            kind="llama3",
            factor=scaling["factor"],
            original_length=scaling["original_max_position_embeddings"],
            low_frequency_factor=scaling["low_freq_factor"],
            high_frequency_factor=scaling["high_freq_factor"],
        )
    count = TINY["num_features"](name)
    config = DrafterConfig(
        width=TINY["WIDTH"],
        verifier_width=TINY["WIDTH"],
        num_features=count,
        num_heads=TINY["HEADS"],
        num_kv_heads=TINY["KV_HEADS"],
        head_width=TINY["HEAD_WIDTH"],
        mlp_width=TINY["MLP_WIDTH"],
        vocab_size=TINY["VOCABULARY"],
        draft_vocab_size=TINY["draft_vocabulary"](name),
        rope=rope,
        norm_eps=TINY["NORM_EPS"],
        **TINY["flags"](name),
    )
    spec = FeatureSpec(boundaries=(1, 2, 3)[:count], width=TINY["WIDTH"], num_layers=4)
    make = functools.partial(Drafter, config, spec, jax.random.key(0))
    return fill(make, arrays_of(name), np.float32)


def verifier_of(name: str) -> Verifier:
    """A verifier with a golden drafter's embedding; nothing else of it is used."""
    shared = tiny_verifier("llama", vocab_size=TINY["VOCABULARY"], width=TINY["WIDTH"])
    verifier = jax.tree.map(lambda x: x, shared)
    verifier.embedding[...] = jnp.asarray(TINY["tensors"](name)["embed_tokens.weight"])
    return verifier


@jax.jit
def read(drafter, verifier, features, tokens, cache, at):
    """Read a chunk of a text, and the token after it, into a cache: the rows' hidden states."""
    b, t = features.array.shape[:2]
    offset = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    scope = block_scope(at, offset, causal(b, t))
    hidden, rows = context_pass(drafter, features, verifier.embed(tokens[:, 1:]), scope, cache)
    return hidden, write_rows(cache, Rows(keys=rows.keys, values=rows.values), at)


@functools.partial(jax.jit, static_argnames="depth")
def grow(drafter, verifier, hidden, cache, length, depth):
    """The greedy chain below the last of `length` context rows, and its logits."""
    roots = Roots(
        positions=length[:, None] - 1,
        lo=jnp.zeros_like(length)[:, None],
        hi=length[:, None],
        context=cache,
    )
    last = DraftHidden(array=hidden.array[:, -1:])
    return grow_chain(drafter, verifier.embed, last, roots, depth)


def decoded(drafter, verifier, features, tokens):
    """A prompt as decoding takes it: context passes in two chunks, then growth from the last row.

    Args:
        drafter: drafts.
        verifier: its embedding only.
        features: of the prompt.
        tokens: [1 t], the prompt's and the token after it.

    Returns:
        Logits of the context rows, tokens of the chain, its logits.
    """
    t = features.array.shape[1]
    half, cache, logits, hidden = t // 2, drafter.make_cache(1, 2 * t), [], None
    for start in (0, half):
        chunk = VerifierFeatures(array=features.array[:, start : start + half], spec=features.spec)
        fed, at = tokens[:, start : start + half + 1], jnp.full((1,), start, jnp.int32)
        hidden, cache = read(drafter, verifier, chunk, fed, cache, at)
        logits.append(drafter.read_out(hidden))
    length = jnp.full((1,), t, jnp.int32)
    chain, chain_of = grow(drafter, verifier, hidden, cache, length, TINY["STEPS"])
    return jnp.concatenate(logits, axis=1), chain, chain_of


@functools.partial(jax.jit, static_argnames="steps")
def learned(drafter, verifier, features, tokens, starts, steps):
    """Logits of every step of training-time test over a text, as learning has them."""
    return jnp.stack(chain_logits(drafter, verifier, features, tokens, starts, steps))


def compared(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Ours and theirs: by route, and the tokens of the `chain`."""
    with np.load(GOLDEN / "drafters" / f"{name}.npz") as file:
        wanted = dict(file)
    drafter, verifier = drafter_of(name), verifier_of(name)
    tokens, documents, array = (jnp.asarray(x)[None] for x in TINY["text"](name))
    first, prompt = TINY["DOCUMENTS"][0], TINY["PROMPT_LENGTH"]
    starts = jnp.where(documents == 0, 0, first).astype(jnp.int32)

    def features(length: int | None) -> VerifierFeatures:
        return VerifierFeatures(array=array[:, :length], spec=drafter.spec)

    rows, chain, logits = decoded(drafter, verifier, features(prompt), tokens[:, : prompt + 1])
    whole = learned(drafter, verifier, features(None), tokens, starts, TINY["STEPS"])
    ours = (
        (rows[0], wanted["logits"][0, :prompt]),
        (logits[0], wanted["greedy_logits"]),
        (whole[:, 0, :-1], wanted["logits"]),
    )
    pairs = dict(zip(ROUTES, ours, strict=True)) | {"chain": (chain[0], wanted["greedy"])}
    return {key: (np.asarray(mine), theirs) for key, (mine, theirs) in pairs.items()}


def test_every_drafter_has_a_golden_file():
    assert sorted(TINY["CONFIGS"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_draws_are_those_of_the_golden_file(name):
    with np.load(GOLDEN / "drafters" / f"{name}.npz") as file:
        assert TINY["checksum"](name) == file["drawn_crc32"]
    check_vocabulary(arrays_of(name)["vocabulary"], TINY["VOCABULARY"])


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_chain_equal_those_of_speculators(name):
    pairs = compared(name)
    for route in ROUTES:
        mine, theirs = pairs[route]
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOLERANCE, err_msg=route)
    np.testing.assert_array_equal(*pairs["chain"])
