"""How cases are made: data, and the loss of a layer of each framework."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.models.measure import Case

BATCH = 16


def normal(*shape: int, seed: int = 0, batch: int = BATCH) -> jax.Array:
    """Inputs of a batch, each of this shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, *shape)), jnp.float32)


def integers(below: int, *shape: int, seed: int = 0, batch: int = BATCH) -> jax.Array:
    """Tokens or labels of a batch."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, (batch, *shape)), jnp.int32)


def weights(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Random parameters of a plain model, scaled as usual."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=shape) / max(shape[:1], default=1) ** 0.5, jnp.float32)
        for name, shape in shapes.items()
    }


def toward(out: jax.Array) -> jax.Array:
    """A loss of any output, whose gradient vanishes nowhere in particular."""
    target = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return jnp.mean(jnp.square(out.astype(jnp.float32) - target))


def next_token(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of every next token of one example."""
    logits = logits.astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits[:-1], tokens[1:])
    return each.mean()


def classify(logits: jax.Array, label: jax.Array) -> jax.Array:
    """The cross-entropy of one example."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def plain(function: Callable, params: Any, *batch: jax.Array, **options: Any) -> Case:
    """A function of (params, *example) whose result is an array."""
    return Case(lambda p, *example: toward(function(p, *example)), params, batch, options)


def linen(module: Any, *batch: jax.Array, method: Any = None, **options: Any) -> Case:
    """A Linen module; collections but its parameters are constants."""
    examples = [x[0] for x in batch]
    variables = module.init(jax.random.key(0), *examples, method=method)
    rest = {name: value for name, value in variables.items() if name != "params"}

    def loss(params, *example):
        return toward(module.apply({"params": params, **rest}, *example, method=method))

    return Case(loss, variables["params"], batch, options)


def of_nnx(module: Any, *batch: jax.Array, call: Callable | None = None, **options: Any) -> Case:
    """An NNX module, passed whole."""
    call = call or (lambda module, *example: module(*example))
    return Case(lambda m, *example: toward(call(m, *example)), module, batch, options)


def haiku(function: Callable, *batch: jax.Array, **options: Any) -> Case:
    """A function that makes and calls Haiku modules; state is constant."""
    import haiku as hk

    model = hk.transform_with_state(function)
    params, state = model.init(jax.random.key(0), *(x[0] for x in batch))

    def loss(params, *example):
        return toward(model.apply(params, state, None, *example)[0])

    return Case(loss, params, batch, options)


def equinox(module: Any, *batch: jax.Array, call: Callable | None = None, **options: Any) -> Case:
    """An Equinox module."""
    call = call or (lambda module, *example: module(*example))
    return Case(lambda m, *example: toward(call(m, *example)), module, batch, options)
