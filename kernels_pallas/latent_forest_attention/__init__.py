"""Attention of a forest over compressed latents, which are keys and values at once."""
