"""Flax NNX models: thin shells around pure functions."""
