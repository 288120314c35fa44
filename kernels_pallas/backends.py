"""Which backend an operation runs on: named, chosen before tracing, never changed in silence."""

from typing import Literal, get_args

import jax

Backend = Literal["xla", "mosaic_gpu", "mosaic_gpu_interpret", "reference"]
"""`xla`: blocked, anywhere. `mosaic_gpu`: the kernels for compute capability 9.0. `reference`: the
naive form. `mosaic_gpu_interpret`: the kernels step by step on CPU, slow, for tests."""

BACKENDS: tuple[Backend, ...] = get_args(Backend)
MOST_SLOTS = 64
"""Slots of a block that the kernels take, root and nodes together."""

CAPABILITY = "9.0"
"""Compute capability with the kernels' instructions (TMA and wgmma): H100, H200, GH200."""


def interpreted(backend: Backend) -> bool | None:
    """Whether a kernel is interpreted; None where the backend is no kernel."""
    return {"mosaic_gpu": False, "mosaic_gpu_interpret": True}.get(backend)


def available(backend: Backend) -> str | None:
    """Why this process cannot run `backend`; None where it can."""
    if backend != "mosaic_gpu":
        return None
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"the kernels need a GPU of compute capability {CAPABILITY}, found {device.platform}"
    found = str(getattr(device, "compute_capability", "unknown"))
    if found != CAPABILITY:
        return (
            f"the kernels need a GPU of compute capability {CAPABILITY} (TMA and wgmma), found "
            f"{device.device_kind} with {found}"
        )
    return None


def check_backend(backend: str) -> Backend:
    """`backend`, where it is one and this process can run it.

    Raises:
        ValueError: an unknown name, or a backend this process cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"kernels {backend!r}: expected one of {', '.join(BACKENDS)}")
    reason = available(backend)
    if reason is not None:
        raise ValueError(f"kernels {backend!r}: {reason}; use xla")
    return backend
