"""The one speculative loop, and the stages that decoding and learning hand it."""

from eagle3_jax.loop.run import run

__all__ = ["run"]
