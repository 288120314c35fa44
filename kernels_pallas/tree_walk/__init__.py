"""Greedy judgement of a tree: from the root, always to the child that was agreed to."""
