"""Attention of a forest: every root sees its context and, in its own block, its ancestors."""
