"""Training and evaluating drafters."""
