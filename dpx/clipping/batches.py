"""Batches that are empty, padded, not finite, or taken a slice at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpx.clipping import groups as _groups
from dpx.clipping import materialize as _materialize
from dpx.clipping import params as _params
from dpx.clipping import reports
from dpx.clipping import sums as _sums

# Microbatches between two compensated additions.
BLOCK = 8


def batch_size(batch: tuple, mask: Any, strict: bool = False) -> int:
    """The common leading axis of everything in `batch`, and of the mask."""
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = "batch" + jax.tree_util.keystr(path)
        _check_leaf(name, leaf, strict)
        sizes[name] = leaf.shape[0]
    if not sizes:
        raise ValueError("the batch is empty of arrays; pass at least one with a batch axis.")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"batch axes differ: {sizes}; all arrays must hold the same examples.")
    size = next(iter(sizes.values()))
    if mask is not None and (jnp.shape(mask) != (size,) or mask.dtype != bool):
        raise ValueError(
            f"mask of shape {jnp.shape(mask)} and dtype {getattr(mask, 'dtype', type(mask))} "
            f"must be ({size},) bool, True for a real example."
        )
    return size


def _check_leaf(name: str, leaf: Any, strict: bool) -> None:
    dtype = getattr(leaf, "dtype", None)
    is_key = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if is_key and not leaf.ndim:
        raise ValueError(
            f"{name} is a single key, which all examples would share: pass one key for each, such as "
            "dpx.clipping.record_keys(secret_key, step, record_indices)"
        )
    if dtype is None or not leaf.ndim:
        raise ValueError(
            f"{name}={leaf!r} has no batch axis: every array in the batch needs one. Bind what is the same "
            "for all examples, such as a flag or a scalar, to the loss: functools.partial(loss_fn, flag=...)"
        )
    if dtype == jnp.uint32 and leaf.shape == (2,):
        reports.report(
            f"{name} of shape (2,) and dtype uint32 looks like one raw PRNGKey, and is taken for one number "
            "for each of two examples: pass a key for each example, and typed ones (jax.random.key)",
            strict,
        )


def nothing(
    parameters: _params.Parameters, groups: _groups.Groups, aux: Callable, batch: tuple
) -> tuple[list, list, tuple]:
    """The result for an empty batch."""
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    shapes = jax.eval_shape(aux, parameters.leaves, example)
    rest = jax.tree.map(lambda s: jnp.zeros((0, *s.shape), s.dtype), shapes)
    sums = [jnp.zeros(p.shape, _materialize.accumulator(p.dtype)) for p in parameters.leaves]
    return sums, [jnp.zeros(0) for _ in groups.clips], (jnp.zeros(0), rest)


def finite_only(once: Callable, batch: tuple, mask: jax.Array) -> tuple[list, list, Any]:
    """Runs `once` with another example standing in, at weight zero, where no finite gradient is to be had.

    Weight zero alone does not silence an example, since zero times infinity is not zero. Masked ones are
    replaced at once; the others, whose norms must be seen first, in a second run.
    """
    shapes = jax.eval_shape(once, batch, mask)
    sums, *found = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def run(state: tuple) -> tuple:
        keep, _, (_, *before) = state
        sums, *found = once(jax.tree.map(lambda x: _with_stand_ins(x, keep), batch), keep)
        found = jax.tree.map(lambda new, old: _where(keep, new, old), found, before)
        finite = keep & jnp.isfinite(jnp.stack(found[0])).all(0)
        return finite, finite.any() & (keep & ~finite).any(), (sums, *found)

    state = (mask, jnp.array(True), (sums, *found))
    keep, _, (sums, norms, found) = jax.lax.while_loop(lambda state: state[1], run, state)
    return [jnp.where(keep.any(), total, 0) for total in sums], norms, found


def _with_stand_ins(x: jax.Array, keep: jax.Array) -> jax.Array:
    """`x` with its first row that is kept in place of those that are not."""
    return _where(keep, x, x[jnp.argmax(keep)])


def _where(keep: jax.Array, x: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.where(keep.reshape(-1, *(1 for _ in x.shape[1:])), x, other)


def by_microbatches(whole: Callable, step: int, batch: tuple, mask: jax.Array):
    """Runs `whole` over slices of `step` examples in turn, the last one padded.

    A few slices are added up plainly, and only these sums with compensation, which then costs little.
    """
    size = mask.shape[0]
    count = -(-size // step)
    # The last slice is filled up with the last example, masked.
    rows = jnp.minimum(jnp.arange(count * step), size - 1).reshape(count, step)
    real = (jnp.arange(count * step) < size).reshape(count, step)
    shapes = jax.eval_shape(lambda: whole(jax.tree.map(lambda x: x[:step], batch), mask[:step]))
    sums, *found = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    found = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), found)

    def slot(index: jax.Array, state: tuple) -> tuple:
        partial, found = state
        part = jax.tree.map(lambda x: x[rows[index]], batch)
        sums, *new = whole(part, mask[rows[index]] & real[index])
        found = jax.tree.map(lambda x, y: x.at[index].set(y), found, new)
        return jax.tree.map(jnp.add, partial, sums), found

    def block(index: jax.Array, state: tuple) -> tuple:
        total, found = state
        first = index * BLOCK
        last = jnp.minimum(first + BLOCK, count)
        partial, found = jax.lax.fori_loop(first, last, slot, (sums, found))
        return _sums.add(total, partial), found

    start = _sums.start(sums), found
    total, found = jax.lax.fori_loop(0, -(-count // BLOCK), block, start)
    found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:size], found)
    return _sums.result(total), *found
