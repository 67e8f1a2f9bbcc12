"""Pitfalls: steps of a few lines on which implementations of checkpointing and offload silently go wrong."""
