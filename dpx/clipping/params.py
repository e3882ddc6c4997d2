"""Parameters of any framework as a flat list of arrays to differentiate, all or those that `wrt` names."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer


class Parameters(NamedTuple):
    """The arrays to differentiate, and how to call the user's loss with them.

    Attributes:
      leaves: the arrays to differentiate, in tree order.
      paths: their names, e.g. `params/Dense_0/kernel`.
      tree: the tree that gradients have: for an NNX module or state, an `nnx.State` of the variables that
        are differentiated; the tree itself otherwise, with None where a leaf is not differentiated.
      rebuild: a function of (leaves, constants) that returns the first argument of the user's loss.
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
        return self._replace(constants=[given.get(i, x) for i, x in enumerate(self.constants)])


def flatten(params: Any, wrt: Any = None) -> Parameters:
    """Splits `params` into arrays to differentiate and everything else, which is constants of the loss.

    An NNX module is split as `nnx.grad` does: its `nnx.Param`s are differentiated. Other state (random
    counters, batch statistics) is read, and what the loss writes to it is dropped. In any other tree the
    floating-point arrays are differentiated; Python scalars, functions and integer arrays are not.

    Raises:
      ValueError: there is nothing to differentiate, a parameter is complex, or, where `wrt` names nothing,
        there is the state of an optimizer beside the parameters.
    """
    if wrt is None:
        _refuse_holders(params)
    if isinstance(params, nnx.Module):
        kind = wrt if isinstance(wrt, type) else nnx.Param
        graph, state, rest = nnx.split(params, kind, ...)
        inner = flatten(state, wrt)
        first, constants = len(inner.constants), [*inner.constants, *jax.tree.leaves(rest)]

        def rebuild_module(leaves: Sequence[jax.Array], given: Sequence[Any]) -> Any:
            # A copy, because a module may count in its state only where that was made.
            copy = jax.tree.unflatten(jax.tree.structure(rest), given[first:])
            return nnx.merge(graph, inner.rebuild(leaves, given[:first]), copy)

        return inner._replace(rebuild=rebuild_module, constants=constants)

    everything, structure = jax.tree.flatten(params)
    named = zip(everything, select(wrt, params), strict=True)
    trained = [is_weight(leaf) and is_named for leaf, is_named in named]
    each = list(zip(everything, trained, strict=True))
    leaves = [jnp.asarray(leaf) for leaf, own in each if own]
    constants = [leaf for leaf, own in each if not own]
    if not leaves:
        which = "" if wrt is None else f" that wrt={wrt!r} names"
        raise ValueError(
            f"params has no floating-point array{which}, so that there is nothing to differentiate: give "
            "parameters, or an instance of a model"
        )
    tree = structure.unflatten(leaf if own else None for leaf, own in each)
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

    def rebuild(new_leaves: Sequence[jax.Array], given: Sequence[Any]) -> Any:
        remaining, others = iter(new_leaves), iter(given)
        return structure.unflatten(next(remaining if own else others) for own in trained)

    return Parameters(leaves, paths, tree, rebuild, constants)


def is_weight(leaf: Any) -> bool:
    """Whether a leaf is an array that can be differentiated."""
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    return is_array and jnp.issubdtype(leaf.dtype, jnp.inexact)


def check_wrt(wrt: Any) -> None:
    """Raises ValueError unless `wrt` is None, a filter or a mask."""
    if wrt is not None and not _is_mask(wrt) and not callable(wrt):
        raise ValueError(
            f"wrt={wrt!r} must be a type of nnx.Variable, a function of (path, leaf), or a tree of bools "
            "that is a prefix of the parameters: give one of them, such as nnx.LoRAParam"
        )


def _is_mask(wrt: Any) -> bool:
    # An Equinox module of bools can be called, too.
    leaves = jax.tree.leaves(wrt)
    return bool(leaves) and all(isinstance(leaf, bool | np.bool_) for leaf in leaves)


def select(wrt: Any, params: Any) -> list[bool]:
    """For each leaf of `params`, whether `wrt` names it."""
    if wrt is None:
        return [True for _ in jax.tree.leaves(params)]
    if _is_mask(wrt):
        message = "wrt={} must be a prefix of the parameter tree {}: give True or False for each subtree ({})"
        marks = jax.tree.leaves(wrt)
        return [bool(marks[number]) for number in spread(wrt, params, message)]
    chosen: Callable = nnx.filterlib.to_predicate(wrt)

    def mark(path: tuple, leaf: Any) -> Any:
        return jax.tree.map(lambda _: bool(chosen(tuple(map(_name, path)), leaf)), leaf)

    marks = jax.tree.map_with_path(mark, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return jax.tree.leaves(marks)


def spread(prefix: Any, tree: Any, message: str) -> list[int]:
    """For each leaf of a tree, the number of the leaf of a prefix that stands for it.

    Where the tree has an `nnx.State`, the prefix may have a plain dict.

    Raises:
      ValueError: it is no prefix, or has None where the tree has a leaf. `message` has places for the prefix,
        the structure of the tree, and what is wrong.
    """
    if not isinstance(prefix, nnx.State):

        def plain(x: Any) -> Any:
            return nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x

        tree = jax.tree.map(plain, tree, is_leaf=lambda x: isinstance(x, nnx.State))
    structure = jax.tree.structure(prefix)
    numbers = structure.unflatten(range(structure.num_leaves))
    try:
        spread_out = jax.tree.broadcast(numbers, tree, is_leaf=lambda x: x is None)
        both = (jax.tree.leaves(x, is_leaf=lambda x: x is None) for x in (spread_out, tree))
        numbers = [number for number, leaf in zip(*both, strict=True) if leaf is not None]
        if None in numbers:
            raise ValueError("it has None where a parameter is trained")
    except ValueError as error:
        line = " ".join(str(error).split())
        raise ValueError(message.format(repr(prefix), jax.tree.structure(tree), line)) from error
    return numbers


def _name(key: Any) -> Any:
    """The name or number that a key of a tree path stands for."""
    names = (getattr(key, attribute, None) for attribute in ("key", "name", "idx"))
    return next((name for name in names if name is not None), str(key))


def _refuse_holders(params: Any) -> None:
    """Raises ValueError for a tree that holds more than parameters, all of which would be trained.

    It refuses states of Optax, of `dpx.privatize` and of Equinox, wherever they are, and results of `fit`.
    """
    holders: list[Any] = []

    def is_holder(node: Any) -> bool:
        kind, module = type(node), type(node).__module__
        if not isinstance(node, nnx.Rngs) and (  # These have an attribute of any name.
            isinstance(node, nnx.Optimizer)
            or (hasattr(node, "opt_state") and hasattr(node, "params"))
            or (hasattr(node, "_fields") and module.startswith(("optax.", "dpx.training.")))
            or (module.startswith("equinox.") and kind.__name__ == "State")
        ):
            holders.append(node)
        return bool(holders)

    jax.tree.leaves(params, is_leaf=is_holder)
    if holders:
        where = "is" if holders[0] is params else "holds"
        remedy = "such as state.params" if hasattr(holders[0], "params") else "without it"
        raise ValueError(
            f"params {where} a {type(holders[0]).__name__}, which has more than parameters, and all of its "
            f"arrays would be trained and get noise: pass the parameters alone, {remedy}"
        )


def check_finite(parameters: Parameters) -> None:
    """Raises ValueError for a parameter that is NaN or infinite, where its value is known (outside `jit`)."""
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
