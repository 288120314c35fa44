"""The one attention operation of verifier and drafter, and the choice of its backend."""

from typing import Literal

from jax import Array
from jaxtyping import Bool, Float, Int

from kernels_pallas.forest_attention import reference, xla

Backend = Literal["xla", "reference"]


def forest_attention(
    q: Float[Array, "b r w h hd"],
    keys: Float[Array, "l rows k s hd"],
    values: Float[Array, "l rows k s hv"] | None,
    layer: Int[Array, ""] | int,
    lo: Int[Array, "b r w"],
    hi: Int[Array, "b r"],
    own_keys: Float[Array, "b r u k hd"],
    own_values: Float[Array, "b r u k hv"] | None,
    ancestors: Bool[Array, "b w u"],
    *,
    scale: float,
    sinks: Float[Array, " h"] | None = None,
    value_width: int | None = None,
    row: Int[Array, ""] | int = 0,
    differentiable: bool = False,
    backend: Backend = "xla",
) -> Float[Array, "b r w h hv_out"]:
    """Attend to a root's context and to the query's ancestors in the root's own block.

    Slot w of root r sees the context slots `lo <= slot < hi` of its layer and the own keys its
    `ancestors` allow, itself among them; one softmax over both.

    Args:
        q: queries; h is a multiple of k.
        keys: the context, a whole cache; only the slots in use are read. Its rows may be more than
            b: the queries belong to rows `row .. row + b - 1`.
        values: the context's values; None for latent attention, whose values are the first
            `value_width` entries of the keys.
        layer: which layer of the cache.
        lo: first context slot seen (documents, sliding windows).
        hi: one past the last context slot seen.
        own_keys: keys of each root's block.
        own_values: values of each root's block; None exactly where `values` is.
        ancestors: which own keys a block slot sees.
        scale: factor on the scores.
        sinks: one learned logit a head that joins the softmax and carries no value (gpt-oss).
        value_width: needed where `values` is None.
        row: first cache row the queries belong to.
        differentiable: the form with gradients; it reads the whole context and is meant for
            contexts of one text. The other form reads only the blocks in use.
        backend: `xla` or the naive `reference`.

    Returns:
        The attended values, in the dtype of `q`; zero for a query that sees nothing.

    Raises:
        ValueError: `values`, `own_values` and `value_width` do not fit together, or h is not a
            multiple of k.
    """
    if (values is None) != (own_values is None):
        raise ValueError("values and own_values: give both, or neither (latent attention)")
    if (values is None) == (value_width is None):
        raise ValueError("value_width is needed exactly where values is None (latent attention)")
    if q.shape[3] % keys.shape[2]:
        raise ValueError(f"{q.shape[3]} query heads do not divide over {keys.shape[2]} key heads")
    if backend == "reference":
        attend = reference.attend
    elif differentiable:
        attend = xla.attend_differentiable
    else:
        attend = xla.attend_blocked
    if values is None or own_values is None:
        assert value_width is not None
        if attend is not xla.attend_blocked:
            values, own_values = keys[..., :value_width], own_keys[..., :value_width]
    return attend(
        q,
        keys,
        values,
        layer,
        lo,
        hi,
        own_keys,
        own_values,
        ancestors,
        scale=scale,
        sinks=sinks,
        value_width=value_width,
        row=row,
    )
