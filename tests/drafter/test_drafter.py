"""The drafter's flags: refused, stored, loaded, described, made by training's shape."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.drafters import read_manifest
from eagle3_jax.contracts import LoadError, RequestError
from eagle3_jax.describe import describe_drafter
from eagle3_jax.drafter import Drafter
from eagle3_jax.load import find_drafter
from eagle3_jax.states import arrays_of, fill
from eagle3_jax.testing import tiny_drafter, tiny_verifier
from eagle3_jax.training.start import DrafterShape, new_drafter
from eagle3_jax.training.trainer import export

FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "qk_norm")
MOST = {"fc_norm": True, "norm_before_residual": True, "norm_output": True, "qk_norm": True}
ADDED = {
    "fc_norm": {"fc_norm.weight": (3, 32)},
    "norm_before_fc": {"input_norm.weight": (96,)},
    "qk_norm": {"q_norm.weight": (6,), "k_norm.weight": (6,)},
}


def flags_of(config) -> list[str]:
    """Those that are on."""
    return [flag for flag in FLAGS if getattr(config, flag)]


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_adds_its_norms_and_nothing_else(flag):
    plain, one = (
        {name: value.shape for name, value in arrays_of(drafter).items()}
        for drafter in (tiny_drafter("llama"), tiny_drafter("llama", **{flag: True}))
    )
    assert flags_of(tiny_drafter("llama").config) == []
    assert one == plain | ADDED.get(flag, {})


def test_two_norms_before_fusion_are_refused():
    with pytest.raises(RequestError, match="fc_norm and norm_before_fc exclude.*leave") as refusal:
        tiny_drafter("llama", fc_norm=True, norm_before_fc=True)
    assert "\n" not in str(refusal.value)


def test_what_is_read_out_is_normed_once():
    """With `norm_output` the hidden state comes normed, and so it is fed back."""
    drafter = tiny_drafter("llama", norm_output=True)
    before = tiny_drafter("llama")
    hidden = jax.random.normal(jax.random.key(0), (1, 3, 24))
    normed = dataclasses.replace(drafter.fuse(features(drafter)), array=before.norm(hidden))
    np.testing.assert_array_equal(
        drafter.read_out(normed), before.read_out(dataclasses.replace(normed, array=hidden))
    )


def features(drafter: Drafter):
    """Features of a short text."""
    tokens = jnp.arange(2, 9, dtype=jnp.int32)[None]
    return tiny_verifier("llama").score(tokens, drafter.spec.boundaries).features


def test_norms_stay_float32_and_what_is_computed_does_not():
    drafter = tiny_drafter("llama", **MOST)
    make = functools.partial(Drafter, drafter.config, drafter.spec, jax.random.key(0))
    arrays = {name: np.asarray(value) for name, value in arrays_of(drafter).items()}
    narrow = fill(make, arrays, jnp.bfloat16)
    dtypes = {name: value.dtype for name, value in arrays_of(narrow).items()}
    for name, dtype in dtypes.items():
        if name != "vocabulary":
            assert dtype == (jnp.float32 if name.endswith("norm.weight") else jnp.bfloat16), name
    found = features(drafter)
    found = dataclasses.replace(found, array=found.array.astype(jnp.bfloat16))
    assert narrow.fuse(found).array.dtype == jnp.bfloat16


def test_flags_of_a_shape_are_stored_and_described(tmp_path):
    """Flag by flag from the command line's shape to a folder, and back from it."""
    shape = DrafterShape(**MOST)
    drafter = new_drafter(tiny_verifier("llama"), shape, (1, 2, 3), np.arange(64), seed=0)
    assert flags_of(drafter.config) == list(MOST)
    export(tmp_path, drafter, {})
    assert read_manifest(tmp_path).config == drafter.config
    assert describe_drafter(tmp_path)["flags"] == list(MOST)


def test_a_manifest_from_before_the_flags_has_none():
    folder = find_drafter("tiny-kimi")
    assert folder is not None
    assert not set(FLAGS) & set((folder / "manifest.json").read_text().replace('"', " ").split())
    assert flags_of(read_manifest(folder).config) == []
    assert describe_drafter(folder)["flags"] == []


def test_a_manifest_with_both_norms_is_refused(tmp_path):
    drafter = tiny_drafter("llama", fc_norm=True)
    export(tmp_path, drafter, {})
    file = tmp_path / "manifest.json"
    text = file.read_text()
    assert text.count('"norm_before_fc": false') == 1
    file.write_text(text.replace('"norm_before_fc": false', '"norm_before_fc": true'))
    with pytest.raises(LoadError, match="manifest.json: fc_norm and norm_before_fc exclude"):
        read_manifest(tmp_path)
