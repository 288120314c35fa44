"""Operations of the speculative loop that have kernels, one folder an operation."""

from kernels_pallas.backends import BACKENDS, MOST_SLOTS, Backend, available, check_backend
from kernels_pallas.forest_attention.api import forest_attention
from kernels_pallas.latent_forest_attention.api import latent_forest_attention
from kernels_pallas.tree_walk.api import tree_walk

__all__ = [
    "BACKENDS",
    "MOST_SLOTS",
    "Backend",
    "available",
    "check_backend",
    "forest_attention",
    "latent_forest_attention",
    "tree_walk",
]
