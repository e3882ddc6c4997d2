"""The loss of one example: how it is called, what it must return, and the program of its gradients."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from dpx.clipping import meshes, mixing
from dpx.clipping.params import Parameters

# A function of (arrays to differentiate, one example).
Loss = Callable[[Sequence[jax.Array], Any], jax.Array]


@contextlib.contextmanager
def without_named_axes() -> Iterator[None]:
    """Names the remedy where a loss of one example asks for others by the name of an axis that is not there.

    JAX's own remedy, to bind the axis, would mix examples.
    """
    try:
        yield
    except NameError as error:
        if (found := re.search(r"unbound axis name:? *([^\s.]+)", str(error))) is None:
            raise
        raise ValueError(
            f"loss_fn asks for the axis {found[1]!r}, as a BatchNorm(axis_name=...) or jax.lax.pmean does, "
            "to read other examples, and it is the loss of one: use GroupNorm or LayerNorm, or frozen "
            "statistics (of Equinox eqx.nn.inference_mode), and no collectives"
        ) from None


@without_named_axes()
def trace(
    loss: Loss, leaves: Sequence[jax.Array], batch: Any, vectorised: bool
) -> core.ClosedJaxpr:
    """The program that computes the loss of one example, and its gradients.

    Args:
      loss: of (parameters, one example).
      leaves: the parameters.
      batch: of which only shapes matter.
      vectorised: whether the program will be, over more than one example.

    Raises:
      ValueError: for a loss that mixes examples, and, in a strict call, for what `reports` says.
    """
    example = meshes.one_example(batch)
    closed = jax.make_jaxpr(loss)(list(leaves), example)
    value = core.jaxpr_as_fun(closed)

    def gradients(leaves: list, *example: Any) -> Any:
        return jax.value_and_grad(lambda p: value(*p, *example)[0])(leaves)

    traced = jax.make_jaxpr(gradients)(list(leaves), *jax.tree.leaves(example))
    mixing.check(closed, traced, len(leaves), vectorised and is_vectorised(batch))
    return traced


def is_vectorised(batch: Any) -> bool:
    """Whether a batch is so large that `jax.vmap` is used: of one example some primitives need no rule."""
    return jax.tree.leaves(batch)[0].shape[0] > 1


def functions(
    loss_fn: Callable, has_aux: bool, parameters: Parameters
) -> Callable[[dict[int, jax.Array]], tuple[Loss, Callable[..., Any]]]:
    """A user's loss as two checked functions of (arrays to differentiate, one example): loss, and aux.

    They are made for constants that replace those of the parameters, given by their number. Aux is None
    without `has_aux`. The setting of `jax.numpy_rank_promotion` that holds now will hold within.
    """
    setting = jax.numpy_rank_promotion.value

    def made(given: dict[int, jax.Array]) -> tuple[Loss, Callable[..., Any]]:
        rebuild = parameters.holding(given).rebuild

        def call(leaves: Any, example: tuple) -> Any:
            with jax.numpy_rank_promotion(setting), without_named_axes():
                value = loss_fn(rebuild(leaves), *example)
            if has_aux and (not isinstance(value, tuple) or len(value) != 2):
                raise ValueError(
                    f"loss_fn returned a {type(value).__name__}; with has_aux=True it must return a pair "
                    "(loss, aux)"
                )
            return value if has_aux else (value, None)

        def loss(leaves: Any, example: tuple) -> jax.Array:
            return scalar(call(leaves, example)[0])

        def aux(leaves: Any, example: tuple) -> Any:
            return _arrays(call(leaves, example)[1]) if has_aux else None

        return loss, aux

    return made


def scalar(value: Any) -> jax.Array:
    """Returns a loss; raises ValueError for what is none."""
    if value is None or isinstance(value, tuple | list | dict):
        raise ValueError(
            f"loss_fn returned a {type(value).__name__}; it must return the scalar loss alone, or, with "
            "has_aux=True, a pair (loss, aux)."
        )
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"loss_fn returned an array of shape {shape} and dtype {dtype}; it must return "
            "the floating-point scalar loss of one example."
        )
    return value


def _arrays(aux: Any) -> Any:
    """What a loss returned beside the loss, as arrays; raises ValueError for what is none."""
    aux = jax.tree.map(jnp.asarray, aux)
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            raise ValueError(
                f"loss_fn returned aux{jax.tree_util.keystr(path)} of dtype {leaf.dtype}: it must be an "
                "array of numbers or bools; of a key, return jax.random.key_data"
            )
    return aux
