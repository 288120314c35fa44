"""The form in which decoding's passes over a few tokens read a verifier and a drafter."""

import weakref

import jax

from eagle3_jax.drafter.drafter import Drafter
from eagle3_jax.packed import PackedWeight
from eagle3_jax.turned import turned, weight_bytes
from eagle3_jax.verifier.decoder import Verifier

SMALLEST, LARGEST = 2**26, 2**32
"""Bytes of a verifier that gets a second copy of its weights: below the first they lie in the
processor's caches anyhow, above the second the copy is too dear."""

_apart: weakref.WeakKeyDictionary[Verifier, tuple[list[jax.Array], Verifier]]
_apart = weakref.WeakKeyDictionary()


def apart_pays(verifier: Verifier) -> bool:
    """Whether `Verifier.apart` is worth its memory: on CPU, for dense models of modest size."""
    c = verifier.config
    if verifier.mesh is not None or c.latent or c.moe_layers or jax.default_backend() != "cpu":
        return False
    # Packed kernels are not copied.
    packed = isinstance(verifier.head.kernel, PackedWeight)
    return packed or SMALLEST <= weight_bytes(verifier) <= LARGEST


def decoding_forms(
    verifier: Verifier, drafter: Drafter | None
) -> tuple[Verifier | None, Drafter | None]:
    """The reader of `DecodeStages` (None is the verifier itself) and the drafter beside it.

    The reader is made once for a verifier, and again where its arrays were replaced.
    """
    if not apart_pays(verifier):
        return None, drafter
    leaves = jax.tree.leaves(verifier)
    found = _apart.get(verifier)
    if found is None or any(a is not b for a, b in zip(leaves, found[0], strict=True)):
        found = leaves, verifier.apart()
        _apart[verifier] = found
    return found[1], None if drafter is None else turned(drafter)
