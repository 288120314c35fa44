"""The contracts: feature specs that meet, layer ids of other projects, the two hidden states."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from eagle3_jax import testing
from eagle3_jax.caches import text_scope
from eagle3_jax.contracts import (
    ContractError,
    DraftHidden,
    FeatureSpec,
    VerifierFeatures,
    boundaries_from_ids,
    check_boundaries,
    default_boundaries,
)

SPEC = FeatureSpec((2, 30, 58), width=16, num_layers=61, verifier="big", tokenizer="abc")


def features(b=2, t=3, spec=SPEC):
    """Features that hold their own positions."""
    size = b * t * spec.fused_width
    array = jnp.arange(size, dtype=jnp.float32).reshape(b, t, spec.fused_width)
    return VerifierFeatures(array=array, spec=spec)


def test_equal_specs_pass_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SPEC.require(dataclasses.replace(SPEC), of="the verifier")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"width": 24}, ["width 16", "width 24", "another model"]),
        ({"num_layers": 62}, ["61 layers", "62", "another model"]),
        ({"boundaries": (2, 30, 57)}, ["[2, 30, 58]", "[2, 30, 57]", "other boundaries"]),
        ({"boundaries": (2, 30)}, ["[2, 30]", "other boundaries"]),
        ({"boundaries": (1, 29, 57, 60)}, ["other boundaries"]),
        ({"boundaries": (58, 30, 2)}, ["another order"]),
        ({"boundaries": (3, 31, 59)}, ["off by one", "convention"]),
        ({"boundaries": (1, 29, 57)}, ["off by one", "convention"]),
    ],
)
def test_mismatch_says_expected_found_and_cause(change, words):
    with pytest.raises(ContractError) as refusal:
        SPEC.require(dataclasses.replace(SPEC, **change), of="the verifier tiny")
    for word in [*words, "the verifier tiny"]:
        assert word in str(refusal.value)
    assert ("off by one" in str(refusal.value)) == ("off by one" in words)


@pytest.mark.parametrize("what", ["verifier", "tokenizer"])
def test_identity_only_warns(what):
    other = dataclasses.replace(SPEC, **{what: "sibling"})
    with pytest.warns(UserWarning, match=f"{what} .* the verifier has sibling"):
        SPEC.require(other, of="the verifier")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SPEC.require(other, of="the verifier", identity=False)
        SPEC.require(dataclasses.replace(SPEC, **{what: None}), of="the verifier")


def test_default_boundaries():
    assert default_boundaries(61) == (2, 30, 58)
    assert default_boundaries(32) == (2, 16, 29)
    assert default_boundaries(8) == (2, 4, 5)


@pytest.mark.parametrize("num_layers", [1, 4, 5, 6])
def test_shallow_verifiers_have_no_default(num_layers):
    """The last that has one is of 7 layers; of 6, L // 2 and L - 3 are the same."""
    assert default_boundaries(7) == (2, 3, 4)
    with pytest.raises(ContractError, match="name the boundaries"):
        default_boundaries(num_layers)


def test_layer_ids_by_convention():
    """The field report's drafter: the same ids are two different things."""
    assert boundaries_from_ids((2, 30, 58), "boundary", 61) == (2, 30, 58)
    assert boundaries_from_ids((2, 30, 58), "layer-output", 61) == (3, 31, 59)


def test_layer_ids_without_a_convention_are_refused():
    with pytest.raises(ContractError, match="pass convention=") as refusal:
        boundaries_from_ids((2, 30, 58), None, 61)
    assert "[2, 30, 58]" in str(refusal.value) and "[3, 31, 59]" in str(refusal.value)


def test_layer_ids_outside_the_verifier_are_refused():
    assert boundaries_from_ids((60,), "layer-output", 61) == (61,)
    with pytest.raises(ContractError, match="61 layers"):
        boundaries_from_ids((2, 30, 61), "layer-output", 61)


@pytest.mark.parametrize("boundaries", [(), (2, 2), (-1,), (62,)])
def test_boundaries_a_verifier_does_not_have(boundaries):
    with pytest.raises(ContractError, match="distinct numbers between 0"):
        check_boundaries(boundaries, 61)
    with pytest.raises(ContractError):
        dataclasses.replace(SPEC, boundaries=boundaries)
    check_boundaries((0, 61), 61)


def test_features_of_one_boundary_are_not_features_of_three():
    with pytest.raises(ContractError, match=r"width 48 \(3 x 16\), found 16"):
        VerifierFeatures(array=jnp.zeros((1, 2, 16)), spec=SPEC)
    assert features().array.shape == (2, 3, 48)


def test_both_types_pass_transformations():
    """jit, tree.map to shapes, scan outputs and eval_shape rebuild them with other leaves."""
    hidden = DraftHidden(array=jnp.ones((2, 3, 4)))
    for one in (features(), hidden):
        kind, shape = type(one), one.array.shape
        out = jax.jit(lambda x: jax.tree.map(lambda a: 2 * a, x))(one)
        assert isinstance(out, kind)
        np.testing.assert_array_equal(out.array, 2 * one.array)

        shapes = jax.tree.map(lambda a: a.shape, one)
        assert isinstance(shapes, kind)
        abstract = jax.eval_shape(lambda x: x, one)
        assert isinstance(abstract, kind) and abstract.array.shape == shape

        carry, stacked = jax.lax.scan(lambda x, _: (x, x), one, length=5)
        assert isinstance(stacked, kind) and stacked.array.shape == (5, *shape)
        np.testing.assert_array_equal(carry.array, one.array)
    assert jax.jit(lambda x: x)(features()).spec == SPEC


def test_the_spec_is_static():
    """Another spec is another program, and specs are compared, not stacked."""
    seen = []

    @jax.jit
    def width(x):
        seen.append(x.spec)
        return jnp.sum(x.array)

    width(features())
    width(features())
    width(features(spec=dataclasses.replace(SPEC, boundaries=(1, 2, 3))))
    assert [s.boundaries for s in seen] == [(2, 30, 58), (1, 2, 3)]


def test_the_two_types_cannot_be_swapped():
    """The step takes no features and the fusion no draft hidden, even where widths are equal."""
    drafter = testing.tiny_drafter("llama", width=96)
    assert drafter.config.width == drafter.spec.fused_width
    array = jnp.zeros((1, 3, 96))
    good = VerifierFeatures(array=array, spec=drafter.spec)
    hidden = DraftHidden(array=array)
    embeddings, scope = jnp.zeros((1, 3, 32)), text_scope(jnp.zeros((1, 3), jnp.int32))

    def layer(x):
        return jax.eval_shape(lambda: drafter.layer(x, embeddings, scope, None))

    assert isinstance(layer(hidden)[0], DraftHidden)
    assert isinstance(drafter.fuse(good), DraftHidden)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'hidden'"):
        layer(good)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'features'"):
        drafter.fuse(hidden)  # type: ignore[arg-type]
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'hidden'"):
        layer(array)


def test_fusion_refuses_features_of_other_boundaries():
    drafter = testing.tiny_drafter("llama")
    for spec, words in (
        (dataclasses.replace(drafter.spec, boundaries=(2, 3, 4)), "off by one"),
        (dataclasses.replace(drafter.spec, boundaries=(3, 2, 1)), "another order"),
        (dataclasses.replace(drafter.spec, num_layers=5), "5"),
    ):
        with pytest.raises(ContractError, match=words):
            drafter.fuse(features(spec=spec))
