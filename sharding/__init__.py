"""Meshes, partition rules and the start of several processes."""

EAGLE3_JAX_MARK = "eagle3-jax 0.1.0"
