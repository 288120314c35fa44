"""The frozen verifier: Flax NNX modules of every family, one decoder."""

from eagle3_jax.verifier.decoder import Verifier

__all__ = ["Verifier"]
