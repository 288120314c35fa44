"""The EAGLE-3 drafter and its vocabulary map."""

from eagle3_jax.drafter.drafter import Drafter

__all__ = ["Drafter"]
