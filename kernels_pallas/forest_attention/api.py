"""The one attention operation of verifier and drafter, and the choice of its backend."""

from jax import Array
from jaxtyping import Bool, Float, Int

from kernels_pallas.backends import Backend, interpreted
from kernels_pallas.forest_attention import reference, xla


def forest_attention(
    q: Float[Array, "b r w h hd"],
    keys: Float[Array, "l rows k s hd"],
    values: Float[Array, "l rows k s hv"],
    layer: Int[Array, ""] | int,
    lo: Int[Array, "b r w"],
    hi: Int[Array, "b r"],
    own_keys: Float[Array, "b r u k hd"],
    own_values: Float[Array, "b r u k hv"],
    ancestors: Bool[Array, "b w u"],
    *,
    scale: float,
    sinks: Float[Array, " h"] | None = None,
    row: Int[Array, ""] | int = 0,
    differentiable: bool = False,
    backend: Backend = "xla",
    splits: int | None = None,
) -> Float[Array, "b r w h hv"]:
    """Attend to a root's context and to the query's ancestors in the root's own block.

    Slot w of root r sees the context slots `lo <= slot < hi` of its layer and the own keys its
    `ancestors` allow, itself among them; one softmax over both.

    Args:
        q: queries; h is a multiple of k.
        keys: the context, a whole cache; only the slots in use are read. Its rows may be more than
            b: the queries belong to rows `row .. row + b - 1`.
        values: the context's values.
        layer: which layer of the cache.
        lo: first context slot seen (documents, sliding windows).
        hi: one past the last context slot seen.
        own_keys: keys of each root's block.
        own_values: values of each root's block.
        ancestors: which own keys a block slot sees.
        scale: factor on the scores.
        sinks: one learned logit a head that joins the softmax and carries no value (gpt-oss).
        row: first cache row the queries belong to.
        differentiable: the form with gradients; it reads the whole context and is meant for
            contexts of one text. The other form reads only the blocks in use.
        backend: which form computes it; the kernels do what `unsupported` finds no fault with.
        splits: of the kernel: parts of the context, None for as many as fill an H200.

    Returns:
        The attended values, in the dtype of `q`; zero for a query that sees nothing.

    Raises:
        ValueError: h is not a multiple of k.
        NotImplementedError: the backend cannot; the message says why.
    """
    if q.shape[3] % keys.shape[2]:
        raise ValueError(f"{q.shape[3]} query heads do not divide over {keys.shape[2]} key heads")
    options = {"scale": scale, "sinks": sinks, "row": row}
    interpret = interpreted(backend)
    if interpret is not None:
        from kernels_pallas.forest_attention import mosaic_gpu  # slow to import: only where used

        if differentiable:
            raise NotImplementedError("mosaic_gpu has no gradients; use the backend xla")
        attend = mosaic_gpu.attend
        options |= {"splits": splits, "interpret": interpret}
    elif backend == "reference":
        attend = reference.attend
    else:
        attend = xla.attend_differentiable if differentiable else xla.attend_blocked
    return attend(q, keys, values, layer, lo, hi, own_keys, own_values, ancestors, **options)


def unsupported(
    q: Float[Array, "b r w h hd"],
    keys: Float[Array, "l rows k s hd"],
    values: Float[Array, "l rows k s hv"],
    own_keys: Float[Array, "b r u k hd"],
    own_values: Float[Array, "b r u k hv"],
) -> str | None:
    """Why `mosaic_gpu` cannot do a call, None where it can; by shapes and dtypes alone.

    For callers that choose `xla` then, such as prefill, whose chunks are wider than a tree.
    """
    from kernels_pallas.forest_attention import mosaic_gpu

    return mosaic_gpu.unsupported(q, keys, values, own_keys, own_values)
