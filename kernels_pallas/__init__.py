"""Attention operations of the speculative loop, one folder an operation."""

from kernels_pallas.forest_attention.api import forest_attention

__all__ = ["forest_attention"]
