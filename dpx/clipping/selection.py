"""Which parameters are differentiated: all of them, or those that `wrt` names."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx


def check(wrt: Any) -> None:
    """Raises ValueError unless `wrt` is None, a filter or a mask."""
    if wrt is not None and not _is_mask(wrt) and not callable(wrt):
        raise ValueError(
            f"wrt={wrt!r} must be a type of nnx.Variable, a function of (path, leaf), or a tree of bools "
            "that is a prefix of the parameters: give one of them, such as nnx.LoRAParam"
        )


def variables(wrt: Any) -> Any:
    """The filter of what may be differentiated in an NNX module: `nnx.Param`, or the type asked for."""
    return wrt if isinstance(wrt, type) else nnx.Param


def select(wrt: Any, params: Any) -> list[bool]:
    """For each leaf of `params`, whether `wrt` names it.

    Raises:
      ValueError: for a mask that is not a prefix of the parameters.
    """
    if wrt is None:
        return [True for _ in jax.tree.leaves(params)]
    if _is_mask(wrt):
        return _by_mask(wrt, params)
    chosen: Callable = nnx.filterlib.to_predicate(wrt)

    def mark(path: tuple, leaf: Any) -> Any:
        return jax.tree.map(lambda _: bool(chosen(tuple(map(_name, path)), leaf)), leaf)

    marks = jax.tree.map_with_path(mark, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return jax.tree.leaves(marks)


def _is_mask(wrt: Any) -> bool:
    # An Equinox module of bools can be called, too.
    leaves = jax.tree.leaves(wrt)
    return bool(leaves) and all(isinstance(leaf, bool | np.bool_) for leaf in leaves)


def _by_mask(mask: Any, params: Any) -> list[bool]:
    if isinstance(params, nnx.State) and not isinstance(mask, nnx.State):
        params = nnx.to_pure_dict(params)
    try:
        return [bool(leaf) for leaf in jax.tree.leaves(jax.tree.broadcast(mask, params))]
    except ValueError as error:
        raise ValueError(
            f"wrt={mask!r} must be a prefix of the parameter tree {jax.tree.structure(params)}: give True or "
            f"False for each subtree ({error})"
        ) from error


def _name(key: Any) -> Any:
    """The name or number that a key of a tree path stands for."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)
