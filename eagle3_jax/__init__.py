"""EAGLE-3 speculative decoding in JAX."""
