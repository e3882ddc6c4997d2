"""Parameters of any framework as a flat list of arrays to differentiate."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from dpx.clipping import selection as _selection


class Parameters(NamedTuple):
    """What is differentiated, and how to call the user's loss with it.

    Attributes:
      leaves: the floating-point arrays of the parameter tree, in tree order.
      paths: their names, e.g. `params/Dense_0/kernel`.
      tree: the tree that gradients have: for an NNX module or state, an `nnx.State` of the variables that
        are differentiated; the tree itself otherwise, with None where a leaf is not differentiated.
      rebuild: leaves -> what the user's loss takes as its first argument; with a second list, of other
        constants than its own.
      constants: the leaves that are not differentiated.
    """

    leaves: list[jax.Array]
    paths: list[str]
    tree: Any
    rebuild: Callable[..., Any]
    constants: list[Any]

    def gradient_tree(self, leaves: Sequence[jax.Array]) -> Any:
        """A tree of gradients from their flat list."""
        return jax.tree.unflatten(jax.tree.structure(self.tree), leaves)

    def holding(self, given: dict[int, jax.Array]) -> "Parameters":
        """The same with other values for some of the constants, by their number."""
        constants = [given.get(i, leaf) for i, leaf in enumerate(self.constants)]
        return self._replace(
            constants=constants, rebuild=lambda leaves: self.rebuild(leaves, constants)
        )


def flatten(params: Any, wrt: Any = None) -> Parameters:
    """Splits `params` into arrays to differentiate and everything else, which stays constant.

    An NNX module is split as `nnx.grad` does: its `nnx.Param`s are differentiated; other state
    (random counters, batch statistics) is read and what the loss writes to it is dropped. In any
    other tree the floating-point arrays are differentiated; Python scalars, functions and
    integer arrays, as in Equinox modules, are not.

    What `wrt` does not name becomes a constant of the loss, so that nothing is computed for it.

    Args:
      params: the parameters.
      wrt: as in `dpx.clipped_grad`.

    Raises:
      ValueError: there is nothing to differentiate, a parameter is complex, or, where `wrt` names nothing,
        there is the state of an optimizer beside the parameters.
    """
    if wrt is None:
        _refuse_holders(params)
    if isinstance(params, nnx.Module):
        graph, state, rest = nnx.split(params, _selection.variables(wrt), ...)
        inner = flatten(state, wrt)

        constants = [*inner.constants, *jax.tree.leaves(rest)]

        def rebuild_module(leaves: Sequence[jax.Array], given: Sequence[Any] = constants) -> Any:
            first = len(inner.constants)
            # A copy, because a module may count in its state only where that was made.
            copy = jax.tree.unflatten(jax.tree.structure(rest), given[first:])
            return nnx.merge(graph, inner.rebuild(leaves, given[:first]), copy)

        return inner._replace(rebuild=rebuild_module, constants=constants)

    everything, structure = jax.tree.flatten(params)
    trained = [
        selected and is_weight(leaf)
        for leaf, selected in zip(everything, _selection.select(wrt, params), strict=True)
    ]
    leaves = [
        jnp.asarray(leaf)
        for leaf, is_trained in zip(everything, trained, strict=True)
        if is_trained
    ]
    if not leaves:
        which = "" if wrt is None else f" that wrt={wrt!r} names"
        raise ValueError(
            f"params has no floating-point array{which}: there is nothing to differentiate."
        )
    tree = structure.unflatten(
        leaf if keep else None for leaf, keep in zip(everything, trained, strict=True)
    )
    if wrt is not None and isinstance(tree, nnx.State):
        # Without the others, as `nnx.grad(wrt=...)` and `nnx.Optimizer(wrt=...)` have it.
        tree = nnx.filter_state(tree, lambda _, variable: bool(jax.tree.leaves(variable)))
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    for path, leaf in zip(paths, leaves, strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(f"params[{path}] is complex; pass its real and imaginary parts.")

    constants = [leaf for leaf, keep in zip(everything, trained, strict=True) if not keep]

    def rebuild(new_leaves: Sequence[jax.Array], given: Sequence[Any] = constants) -> Any:
        remaining, others = iter(new_leaves), iter(given)
        return structure.unflatten(next(remaining if keep else others) for keep in trained)

    return Parameters(leaves, paths, tree, rebuild, constants)


def _refuse_holders(params: Any) -> None:
    """Raises ValueError for what holds more than parameters: all of its arrays would be trained.

    These are the states of Optax and of `dpx.privatize`, wherever they are in the tree, such as in a
    `TrainState` of Flax, an `nnx.Optimizer`, the state of an Equinox model, and what `dpx.training.fit`
    returned.
    """
    found: list[Any] = []

    def is_holder(node: Any) -> bool:
        kind = type(node)
        module = kind.__module__
        if (
            isinstance(node, nnx.Optimizer)
            or (hasattr(node, "opt_state") and hasattr(node, "params"))
            or (hasattr(node, "_fields") and module.startswith(("optax.", "dpx.training.")))
            or (module.startswith("equinox.") and kind.__name__ == "State")
        ):
            found.append(node)
        return bool(found)

    jax.tree.leaves(params, is_leaf=is_holder)
    if found:
        where = "is" if found[0] is params else "holds"
        remedy = "such as state.params" if hasattr(found[0], "params") else "without it"
        raise ValueError(
            f"params {where} a {type(found[0]).__name__}, which has more than parameters, and all of its "
            f"arrays would be trained and get noise: pass the parameters alone, {remedy}, and the optimizer "
            "apart"
        )


def on_mesh(constants: Sequence[Any]) -> dict[int, jax.Array]:
    """Those of the constants, by their number, whose layout on a mesh is a part of their type."""
    return {
        i: leaf
        for i, leaf in enumerate(constants)
        if isinstance(leaf, jax.Array) and not jax.typeof(leaf).sharding.mesh.empty
    }


def is_weight(leaf: Any) -> bool:
    """Whether a leaf is an array that can be differentiated."""
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    return is_array and jnp.issubdtype(leaf.dtype, jnp.inexact)


def check_finite(parameters: Parameters) -> None:
    """Raises ValueError for a parameter that is NaN or infinite, where its value is known (outside `jit`).

    With such a parameter every gradient would count as not finite, and the sum would be zero.
    """
    with jax.ensure_compile_time_eval():  # of constants of a function that is being traced, too
        known = {
            path: jnp.isfinite(leaf).all()
            for path, leaf in zip(parameters.paths, parameters.leaves, strict=True)
            if not isinstance(leaf, Tracer)
        }
    for path, finite in jax.device_get(known).items():
        if not finite:
            raise ValueError(
                f"params[{path}] holds NaN or infinity, so that no example has a finite gradient: start "
                "from finite parameters, and lower the learning rate where training made them so"
            )


def configured(loss_fn: Callable) -> Callable:
    """The loss under the setting of `jax.numpy_rank_promotion` that holds now, wherever it is called."""
    setting = jax.numpy_rank_promotion.value

    def loss(*arguments: Any) -> Any:
        with jax.numpy_rank_promotion(setting):
            return loss_fn(*arguments)

    return loss


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


def example_functions(
    loss_fn: Callable, has_aux: bool, parameters: Parameters, given: dict[int, jax.Array]
) -> tuple[Callable[..., jax.Array], Callable[..., Any]]:
    """`example_loss`, and `example_aux` or a function that returns None, with constants as `given`."""
    parameters = parameters.holding(given)
    loss = example_loss(loss_fn, parameters, has_aux)
    return loss, example_aux(loss_fn, parameters) if has_aux else lambda *_: None


def example_loss(
    loss_fn: Callable, parameters: Parameters, has_aux: bool = False
) -> Callable[..., jax.Array]:
    """`loss_fn` as a function of (arrays to differentiate, one example), its result checked."""

    def loss(leaves: Any, example: tuple) -> jax.Array:
        with without_named_axes():
            value = loss_fn(parameters.rebuild(leaves), *example)
        return scalar(_pair(value)[0] if has_aux else value)

    return loss


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


def example_aux(loss_fn: Callable, parameters: Parameters) -> Callable[..., Any]:
    """What a loss with `has_aux` returns beside the loss of (arrays to differentiate, one example)."""

    def aux(leaves: Any, example: tuple) -> Any:
        _, found = _pair(loss_fn(parameters.rebuild(leaves), *example))
        found = jax.tree.map(jnp.asarray, found)
        for path, leaf in jax.tree_util.tree_leaves_with_path(found):
            if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
                raise ValueError(
                    f"loss_fn returned aux{jax.tree_util.keystr(path)} of dtype {leaf.dtype}: it must be an "
                    "array of numbers or bools; of a key, return jax.random.key_data"
                )
        return found

    return aux


def _pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(
            f"loss_fn returned a {type(value).__name__}; with has_aux=True it must return a pair (loss, aux)"
        )
    return value
