"""Flax NNX modules, which are thin shells around pure functions."""

from dpx.nn import (
    cross_attention,
    gram_attention,
    linear_attention,
    lora,
    peft,
    pretrained,
    recurrent,
    transformer,
)

__all__ = [
    "cross_attention",
    "gram_attention",
    "linear_attention",
    "lora",
    "peft",
    "pretrained",
    "recurrent",
    "transformer",
]
