"""Forests of drafted nodes: their shape, their growth, and their judging."""
