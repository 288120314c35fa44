"""Absorbed latent attention: one key for all heads, whose first columns are the value."""

from jax import Array
from jaxtyping import Bool, Float, Int

from kernels_pallas.backends import Backend, interpreted
from kernels_pallas.forest_attention import reference, xla


def latent_forest_attention(
    q: Float[Array, "b r w h hd"],
    latents: Float[Array, "l rows 1 s hd"],
    layer: Int[Array, ""] | int,
    lo: Int[Array, "b r w"],
    hi: Int[Array, "b r"],
    own: Float[Array, "b r u 1 hd"],
    ancestors: Bool[Array, "b w u"],
    *,
    scale: float,
    value_width: int,
    row: Int[Array, ""] | int = 0,
    backend: Backend = "xla",
    splits: int | None = None,
) -> Float[Array, "b r w h hv_out"]:
    """`forest_attention` over compressed latents, forward only.

    Args:
        q: queries, absorbed into the latent space (DeepSeek-V2, arXiv 2405.04434, section 2.1).
        latents: the context, a whole cache: normed latent, then rotated key.
        layer: which layer of the cache.
        lo: first context slot seen.
        hi: one past the last context slot seen.
        own: latents of each root's block.
        ancestors: which own latents a block slot sees.
        scale: factor on the scores.
        value_width: of the latents' first columns, which are the values.
        row: first cache row the queries belong to.
        backend: as in `forest_attention`.
        splits: of the kernel: parts of the context, None for as many as fill an H200.

    Returns:
        The attended values, in the dtype of `q`; zero for a query that sees nothing.

    Raises:
        ValueError: the latents are narrower than `value_width`.
        NotImplementedError: the backend cannot; the message says why.
    """
    if not 0 < value_width <= latents.shape[-1]:
        raise ValueError(f"value_width {value_width} of latents that are {latents.shape[-1]} wide")
    options = {"scale": scale, "row": row}
    interpret = interpreted(backend)
    if interpret is not None:
        from kernels_pallas.latent_forest_attention import mosaic_gpu  # slow to import

        options |= {"value_width": value_width, "splits": splits, "interpret": interpret}
        return mosaic_gpu.attend(q, latents, layer, lo, hi, own, ancestors, **options)
    options["sinks"] = None
    if backend == "reference":
        values, own_values = latents[..., :value_width], own[..., :value_width]
        return reference.attend(
            q, latents, values, layer, lo, hi, own, own_values, ancestors, **options
        )
    return xla.attend_blocked(
        q, latents, None, layer, lo, hi, own, None, ancestors, value_width=value_width, **options
    )


def unsupported(
    q: Float[Array, "b r w h hd"],
    latents: Float[Array, "l rows 1 s hd"],
    own: Float[Array, "b r u 1 hd"],
    value_width: int,
) -> str | None:
    """Why `mosaic_gpu` cannot do a call, None where it can; by shapes and dtypes alone."""
    from kernels_pallas.latent_forest_attention import mosaic_gpu

    return mosaic_gpu.unsupported(q, latents, own, value_width)
