"""The shapes at which clipping is measured: recommenders, a cut of GPT-2 and an MLP."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dpx.nn.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Shape:
    """A transformer of these dimensions, or, without a vocabulary, an MLP of width `dim`."""

    batch: int
    dim: int
    vocabulary: int = 0
    length: int = 0
    blocks: int = 2
    heads: int = 1
    last: bool = False


SHAPES = {
    "recommender M=3416 last": Shape(128, 64, 3416, 50, last=True),
    "recommender M=3416 all": Shape(64, 64, 3416, 50),
    "recommender M=23715 last": Shape(64, 64, 23715, 50, last=True),
    "recommender M=23715 all": Shape(16, 64, 23715, 50),
    "gpt2-small 2 blocks": Shape(4, 768, 50257, 256, heads=12),
    "mlp": Shape(128, 1024),
}


def build(shape: Shape, *, abstract: bool = False) -> tuple[Callable, Any, Callable[[int], tuple]]:
    """The loss of one example, parameters, and a function from a batch size to a batch.

    If `abstract`, nothing is allocated: parameters and batches are `jax.ShapeDtypeStruct`.
    """
    model, loss, batch = _transformer(shape) if shape.vocabulary else _mlp(shape)
    graph, params = nnx.split(nnx.eval_shape(model) if abstract else model())

    def of_params(params, *example):
        return loss(nnx.merge(graph, params), *example)

    def abstract_batch(size):
        return jax.eval_shape(lambda: batch(size))

    return of_params, params, abstract_batch if abstract else batch


def _mlp(shape: Shape) -> tuple[Callable, Callable, Callable]:
    rng, widths = np.random.default_rng(0), [784, shape.dim, shape.dim, 10]

    def model():
        sizes = itertools.pairwise(widths)
        return nnx.List([nnx.Linear(n, m, rngs=nnx.Rngs(i)) for i, (n, m) in enumerate(sizes)])

    def loss(layers, x, y):
        *hidden, last = layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return optax.softmax_cross_entropy_with_integer_labels(last(x), y)

    def images(size):
        x = rng.normal(size=(size, 784)).astype(np.float32)
        return jnp.asarray(x), jnp.asarray(rng.integers(0, 10, size))

    return model, loss, images


def _transformer(shape: Shape) -> tuple[Callable, Callable, Callable]:
    rng, sizes = np.random.default_rng(0), (shape.vocabulary, shape.length)

    def model():
        about: Any = {"dim": shape.dim, "num_heads": shape.heads, "num_blocks": shape.blocks}
        return Transformer(*sizes, **about, rngs=nnx.Rngs(0))

    def loss(model, tokens):
        logits = model(tokens[:-1], last_only=shape.last)
        targets = tokens[-1:] if shape.last else tokens[1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def sequences(size):
        return (jnp.asarray(rng.integers(0, shape.vocabulary, (size, shape.length + 1))),)

    return model, loss, sequences
