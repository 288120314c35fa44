"""int8 made while loading: how near it is, what it packs, and a verifier that decodes with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax import testing
from eagle3_jax.int8 import Int8, pack, packable
from eagle3_jax.loop import forms
from eagle3_jax.packed import PackedWeight
from eagle3_jax.states import arrays_of, fill
from eagle3_jax.verifier import Verifier

RNG = np.random.default_rng(0)
TOKENS = jnp.asarray(RNG.integers(0, 64, (2, 9)), jnp.int32)


def weight_of(parts, **more) -> PackedWeight:
    return PackedWeight(**{name: jnp.asarray(x) for name, x in parts.items()}, **more)


@pytest.mark.parametrize("kind", [np.float32, jnp.bfloat16])
def test_codes_are_the_nearest(kind):
    """Half a step off at most, of each output's own step; an output of zeros stays that."""
    kernel = RNG.standard_normal((2, 3, 20, 7)).astype(kind)
    kernel[1, 2, :, 4] = 0
    weight = weight_of(pack(kernel))
    assert weight.codes.dtype == jnp.int8 and weight.shape == kernel.shape
    off = np.abs(np.asarray(weight[...]) - kernel.astype(np.float32))
    step = np.abs(kernel.astype(np.float32)).max(axis=-2, keepdims=True) / 127
    assert (off <= 0.5001 * step).all() and not np.asarray(weight[...])[1, 2, :, 4].any()


def test_a_table_is_packed_by_row():
    table = RNG.standard_normal((9, 20)).astype(np.float32)
    weight = weight_of(pack(table, table=True), table=True)
    assert weight.shape == (9, 20) and weight.scales.shape == (9, 1)
    np.testing.assert_allclose(weight[...], table, atol=0.02)


def packed_verifier(family: str) -> Verifier:
    """A tiny verifier in int8, as loading makes it."""
    plain = testing.tiny_verifier(family)
    arrays = Int8({name: np.asarray(x) for name, x in arrays_of(plain).items()})
    return fill(lambda: Verifier(plain.config, jax.random.key(0), "packed"), arrays, jnp.float32)


def widened(verifier: Verifier) -> Verifier:
    """The same weights, not packed."""
    arrays = {name: np.asarray(x) for name, x in arrays_of(verifier).items()}
    plain = {name: x for name, x in arrays.items() if name.rpartition(".")[2] not in PARTS}
    for name in arrays:
        stem, _, part = name.rpartition(".")
        if part == "codes":
            parts = {p: arrays[f"{stem}.{p}"] for p in PARTS}
            plain[stem] = np.asarray(weight_of(parts, table=stem == "embedding")[...])
    name = "tiny-llama" if verifier.config.experts is None else "tiny-deepseek"
    return fill(lambda: Verifier(verifier.config, jax.random.key(0), name), plain, jnp.float32)


PARTS = ("codes", "scales")


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_a_whole_verifier(family):
    """Everything but norms, router and vectors is packed; passes equal the widened weights'."""
    verifier = packed_verifier(family)
    stems = {n.rpartition(".")[0] for n in arrays_of(verifier) if n.endswith(".codes")}
    plain = arrays_of(testing.tiny_verifier(family))
    assert stems == {name for name in plain if packable(name)}
    assert all(x.ndim <= 2 or "router" in n for n, x in plain.items() if n not in stems)
    assert verifier.dtype == jnp.float32
    found, wanted = (v.score(TOKENS, (0, 2, 4)) for v in (verifier, widened(verifier)))
    np.testing.assert_allclose(found.logits, wanted.logits, atol=1e-5)
    np.testing.assert_allclose(found.features.array, wanted.features.array, atol=1e-5)
    near = testing.tiny_verifier(family).score(TOKENS, (0, 2, 4))
    assert 1e-3 < np.abs(np.asarray(found.logits - near.logits)).max() < 1


def test_it_decodes_as_the_widened_weights_do():
    """Plainly and speculatively, by the reader of few rows."""
    packed = packed_verifier("llama")
    assert forms.apart_pays(packed) and not forms.apart_pays(testing.tiny_verifier("llama"))
    prompts, speculation = [[5, 9, 2, 40, 7], [11, 3]], e3.Speculation(depth=2)
    wanted, plain, speculative = (
        e3.generate(
            verifier, used, prompts, max_new_tokens=12, rows=2, speculation=used and speculation
        ).tokens
        for verifier, used in (
            (widened(packed), None),
            (packed, None),
            (packed, testing.tiny_drafter("llama")),
        )
    )
    assert plain == wanted and speculative == wanted


def test_arrays_are_packed_when_asked_for():
    read = []

    class Watched(dict):
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

    shapes = {"a.kernel": (4, 3), "norm.weight": (4,), "moe_layers.router.kernel": (4, 6)}
    arrays = Int8(Watched({name: np.ones(shape, np.float32) for name, shape in shapes.items()}))
    read.clear()
    names = ["a.kernel.codes", "a.kernel.scales", "norm.weight", "moe_layers.router.kernel"]
    assert list(arrays) == names and len(arrays) == 4 and not read
    assert "a.kernel.codes" in arrays and "a.kernel" not in arrays and "norm.weight" in arrays
    assert arrays["a.kernel.codes"].shape == (3, 4) and arrays["a.kernel.scales"].shape == (3, 1)
    assert read == ["a.kernel"]
