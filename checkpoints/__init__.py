"""The checkpoint store, its manifest, and the formats of other projects both ways."""

EAGLE3_JAX_MARK = "eagle3-jax 0.1.0"
