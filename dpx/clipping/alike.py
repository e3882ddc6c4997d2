"""The norms of parameters that are alike, such as those of blocks that nobody scanned, taken together.

The norm of one gradient is many small steps, all of them the same for a gradient of the same form. So small
gradients that share a threshold are joined, and small matrices of inner products of factors are stacked: a
deep model has no more to trace and to compile for its norms than one of its blocks, and an embedding that is
looked up and multiplied has no more than a matrix that is multiplied.

A compiler writes equal kernels only once, and so what differs from parameter to parameter takes it long: what
is stacked is not cut apart again, and sums of products of factors are computed for each parameter by itself.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx.clipping import grams, joint, plan
from dpx.clipping.joint import Joint
from dpx.clipping.materialize import Norms
from dpx.clipping.plan import Choice
from dpx.clipping.rounding import gamma, in_products
from dpx.clipping.rules import Layout

# Elements for one example of what is stacked, at most: a copy of larger arrays would take time and memory.
SMALL = 2**12

# Gradients that are joined are no fewer than this: a few are compiled as quickly one by one.
SEVERAL = 4


def squared_norms(
    choices: Sequence[Choice], seen: Sequence[Any], groups: Sequence[int]
) -> tuple[list[Norms], list[tuple[Joint, jax.Array]]]:
    """The squared norms of the gradients of all parameters, and the gradients that were joined for them.

    Those are of one group, and so their sums over examples are made with the same clip factors.

    Args:
      choices: how each parameter is treated.
      seen: for each parameter and all examples, its gradients; or the inner products of its factors; or its
        squared norms.
      groups: for each parameter the group that it shares a threshold with.
    """
    is_held = [plan.gram(choice) is None for choice in choices]
    small = [
        all(0 < _size(x) < _limit(choice) for x in jax.tree.leaves(each))
        for choice, each in zip(choices, seen, strict=True)
    ]
    classes: dict[Any, list[int]] = {}
    for k, each in enumerate(seen):
        shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(each)]
        key: Any = k
        if small[k] and is_held[k]:
            # Several devices keep each gradient by itself, laid out like its parameter.
            key = ("gradients", groups[k], each.dtype) if jax.device_count() == 1 else k
        elif small[k]:
            is_square = _is_square(each)
            key = ("products", shapes[-1]) if is_square else ("norms or products", *shapes)
        classes.setdefault(key, []).append(k)
    norms, joined = [], []
    for members in classes.values():
        mine = [seen[k] for k in members]
        owners = tuple(groups[k] for k in members)
        layouts = [rule.layout for k in members if (rule := plan.gram(choices[k])) is not None]
        if not layouts and len(members) < SEVERAL:
            norms += map(Norms.of, owners, mine)
        elif not layouts:
            which, gradients = joint.join(dict(zip(members, mine, strict=True)))
            joined.append((which, gradients))
            # Added up along one axis after the other, the sum of all rounds little.
            pieces = gradients.reshape(len(gradients), -1, joint.piece(which.sizes[0]))
            norms.append(Norms.of(owners[0], pieces))
        else:
            together = small[members[0]] and _is_square(mine[0])
            bounded = _bounded if together else _of_several_shapes
            norms.append(Norms(owners, bounded(layouts, mine)))
    return norms, joined


def _limit(choice: Choice) -> int:
    """What is stacked of a parameter has fewer elements than this for one example."""
    if plan.gram(choice) is not None:
        return SMALL
    # The gradient of a bias may be a cotangent that is there anyway: a copy of it is twice the memory.
    return SMALL // 4 + 1 if choice.tapped else SMALL // 4


def _size(x: jax.Array) -> int:
    """Elements for one example."""
    return math.prod(x.shape[1:])


def _is_square(each: Any) -> bool:
    """Whether these are inner products, all of one number of positions with each other."""
    if not isinstance(each, grams.Products):
        return False
    return len({x.shape for x in jax.tree.leaves(each)} | {each.rows[0].mT.shape}) == 1


def _of_several_shapes(layouts: Sequence[Layout], seen: Sequence[Any]) -> jax.Array:
    """Squared norms (n, B) for n parameters that are alike."""
    stacked = jax.tree.map(_stack, *seen)
    if not isinstance(stacked, grams.Products):
        return stacked.T
    # Parameters of different shapes differ in a few numbers only.
    dtype = grams.dtype(stacked)
    each = [grams.Errors.of(layout, dtype) for layout in layouts]
    errors = jax.tree.map(lambda *found: jnp.array(found, dtype), *each)
    return jax.vmap(jax.vmap(grams.bounded), (None, 0))(errors, stacked).T


def _bounded(layouts: Sequence[Layout], seen: Sequence[grams.Products]) -> jax.Array:
    """`grams.bounded` (n, B) of n parameters whose inner products all have one shape, whatever their uses.

    The terms of all pairs of uses are bounded at once. One-hot rows differ from others in that their inner
    products are exact: their errors are zero.
    """
    dtype, size = grams.dtype(seen[0]), seen[0].columns[0].shape[-1]
    errors: list[grams.Errors] = []  # of each pair
    pairs: list[tuple[int, int]] = []  # for each, where its two uses are paired with themselves
    # For each parameter its pairs, or its uses paired with themselves, and how often they count.
    terms_of: list[list[tuple[int, float]]] = []
    uses_of: list[list[tuple[int, float]]] = []
    for layout, each in zip(layouts, seen, strict=True):
        first, mine = len(pairs), grams.Errors.of(layout, dtype)
        alone: list[int] = []
        while len(pairs) - first < len(each.rows):
            alone.append(len(pairs) + len(alone))
            pairs += [(alone[-1], other) for other in alone]
            one_hot = each.rows[alone[-1] - first].dtype == bool
            exact = mine._replace(rows=0.0, flushed_rows=0.0)
            errors += [exact if one_hot else mine] * len(alone)
        uses_of.append([(use, 1.0) for use in alone])
        terms_of.append([(i, 1.0 if i in alone else 2.0) for i in range(first, len(pairs))])

    left = _stack(*(x.astype(dtype) for each in seen for x in each.rows))
    right = _stack(*(x for each in seen for x in each.columns))
    if left.shape[2] == 1:
        # XLA's compiler for CPUs copies arrays to move an axis of length one.
        left, right = left.squeeze(2), right.squeeze(2)
    error = grams.Errors(*(np.array(x, dtype) for x in zip(*errors, strict=True)))
    of_all = jax.vmap(jax.vmap(grams.lengths), (0, None))
    rows, columns = of_all(left, error.flushed_rows), of_all(right, error.flushed_columns)
    shares = [
        lengths * root.reshape(-1, *[1] * (lengths.ndim - 2))
        for lengths, root in ((rows, error.rows), (columns, error.columns))
    ]
    s, t = ([_taken(x, side) for x in shares] for side in zip(*pairs, strict=True))
    bound = functools.partial(grams.terms, pairs=max(map(len, terms_of)))
    bounds = jax.vmap(jax.vmap(bound))(left, right, s, t)
    totals = _combined(jax.vmap(jax.vmap(grams.added_up))(bounds), terms_of)
    length = _combined(jnp.sum(rows * columns, -1), uses_of)
    if length.ndim > 2:
        length = jnp.sqrt(jnp.sum(jnp.square(length), -1))
    # Otherwise XLA moves a reshape through what follows, one operation in every pass over the whole step.
    totals, length = jax.lax.optimization_barrier((totals, length))
    roundings = [gamma(in_products(len(uses) * (size + 1)), dtype) for uses in uses_of]
    return grams.raised(totals, grams.SLACK * length, jnp.array(roundings, dtype)).T


def _taken(x: jax.Array, indices: Sequence[int]) -> jax.Array:
    """What is at these places along the second axis."""
    return x if list(indices) == list(range(x.shape[1])) else _at(x, np.array(indices))


def _at(x: jax.Array, places: np.ndarray) -> jax.Array:
    return x.at[:, places].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _combined(x: jax.Array, parts: Sequence[Sequence[tuple[int, float]]]) -> jax.Array:
    """Sums along the second axis of what is at some places, times weights: one for each list of both."""
    most = max(map(len, parts))
    if most == 1:
        return x  # in order
    # A place that is not there counts zero times; it is one of the parameter's own.
    padded = np.array([[*part, *[(part[0][0], 0.0)] * (most - len(part))] for part in parts])
    weights = padded[..., 1].reshape(*padded.shape[:2], *[1] * (x.ndim - 2))
    return jnp.sum(_at(x, padded[..., 0].astype(int)) * jnp.asarray(weights, x.dtype), 2)


def _stack(*arrays: jax.Array) -> jax.Array:
    """Arrays (B, ...) as (B, n, ...), joined along an axis that they have: new ones take long to compile."""
    first, *shape = arrays[0].shape
    if not shape:
        return jnp.stack(arrays, 1)
    # XLA's compiler for CPUs would copy each of them to join axes of length one.
    if shape[0] == 1 and len(shape) > 1:
        arrays = tuple(x.reshape(first, *shape[1:]) for x in arrays)
    return jnp.concatenate(arrays, 1).reshape(first, len(arrays), *shape)
