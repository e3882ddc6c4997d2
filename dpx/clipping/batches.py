"""Batches that are empty, padded, not finite, or taken a slice at a time."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx.clipping import groups as _groups
from dpx.clipping import meshes as _meshes
from dpx.clipping import reports
from dpx.clipping.rounding import Sum, accumulator

# The number of microbatches between two compensated additions.
BLOCK = 8
# The bytes of values that a microbatch holds at once: those of a CPU's cache, more or less.
CACHE = 3 * 2**22


def checked(batch: tuple, mask: Any = None, strict: bool = False) -> tuple[int, jax.Array]:
    """The common leading axis of everything in `batch`, and the mask, all True where there is none.

    Raises:
      ValueError: for what is no batch, or no mask of it.
    """
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = "batch" + jax.tree_util.keystr(path)
        _check_leaf(name, leaf, strict)
        sizes[name] = leaf.shape[0]
    if not sizes:
        raise ValueError("the batch is empty of arrays; pass at least one with a batch axis.")
    size, *others = {*sizes.values()}
    if others:
        raise ValueError(f"batch axes differ: {sizes}; all arrays must hold the same examples.")
    mask = jnp.ones(size, bool) if mask is None else jnp.asarray(mask)
    if mask.shape != (size,) or mask.dtype != bool:
        raise ValueError(
            f"mask of shape {mask.shape} and dtype {mask.dtype} must be ({size},) bool, True for a real "
            "example."
        )
    return size, mask


def _check_leaf(name: str, leaf: Any, strict: bool) -> None:
    dtype = getattr(leaf, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
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
    if not is_key and dtype.kind in "OSTUMm":
        raise ValueError(
            f"{name} has dtype {dtype}, which JAX does not compute with: pass numbers, such as the tokens of "
            "a text"
        )
    if dtype == jnp.uint32 and leaf.shape == (2,):
        reports.report(
            f"{name} of shape (2,) and dtype uint32 looks like one raw PRNGKey, and is taken for one number "
            "for each of two examples: pass a key for each example, and typed ones (jax.random.key)",
            strict,
        )


def as_jax(batch: tuple) -> tuple:
    """`batch` with the types that JAX gives to NumPy arrays."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, batch)


def nothing(
    leaves: Sequence[jax.Array], groups: _groups.Groups, aux: Callable, batch: tuple
) -> tuple[list, list, tuple]:
    """The result for an empty batch."""
    shapes = jax.eval_shape(aux, leaves, _meshes.one_example(batch))
    rest = jax.tree.map(lambda s: jnp.zeros((0, *s.shape), s.dtype), shapes)
    sums = [jnp.zeros(leaf.shape, accumulator(leaf.dtype)) for leaf in leaves]
    return sums, [jnp.zeros(0) for _ in groups.clips], (jnp.zeros(0), rest)


def finite_only(once: Callable) -> Callable:
    """Runs `once` with a stand-in, at weight zero, for each example that has no finite gradient.

    Weight zero alone does not silence an example, since zero times infinity is not zero. The stand-in is an
    example of the batch. It replaces what is masked in a first run, and what is not finite, which only norms
    show, in a second one.
    """

    @jax.jit  # Traced once, though it is asked for its shapes first.
    def filled(batch: tuple, keep: jax.Array) -> tuple:
        return once(_filled(batch, keep), keep)

    def whole(batch: tuple, mask: jax.Array) -> tuple[Any, list, Any]:
        def run(state: tuple) -> tuple:
            keep, _, (_, *before) = state
            sums, *of_examples = filled(batch, keep)
            of_examples = jax.tree.map(functools.partial(_where, keep), of_examples, before)
            finite = keep & jnp.isfinite(jnp.stack(of_examples[0])).all(0)
            return finite, keep, (sums, *of_examples)

        # It does not run at all for a batch that is all masked. Loops with a simpler condition are what XLA
        # tries to run while it compiles, which takes long.
        start = mask, ~mask & mask.any(), tuple(_meshes.zeros(jax.eval_shape(filled, batch, mask)))
        keep, _, (sums, *of_examples) = jax.lax.while_loop(
            lambda state: (state[0] != state[1]).any(), run, start
        )
        # The sums are zeros if no example is left that could stand in. A loop makes them, which otherwise
        # hands the sums on as they lie; a branch around the step would take long to compile.
        _, sums = jax.lax.while_loop(lambda state: state[0], _meshes.zeros, (~keep.any(), sums))
        return sums, *of_examples

    return whole


def _where(keep: jax.Array, x: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.where(keep.reshape(-1, *(1 for _ in x.shape[1:])), x, other)


def _filled(batch: tuple, keep: jax.Array) -> tuple:
    """The batch with the first example that is kept in the place of those that are not."""
    return jax.tree.map(lambda x: _where(keep, x, _first(x, keep)), batch)


def _first(x: jax.Array, keep: jax.Array) -> jax.Array:
    """The first row of `x` that is kept; zeros if none is.

    It is the sum of that row alone, so that devices that hold shards of the batch exchange one example. A row
    that is looked up by its index would have to be looked up in all shards.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _first(jax.random.key_data(x), keep)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    row = jnp.arange(len(keep))
    only = _where(row == jnp.min(jnp.where(keep, row, len(keep))), x, jnp.zeros((), x.dtype))
    return only.any(0) if x.dtype == bool else only.sum(0, dtype=x.dtype)


def chosen(size: int, one: int, leaves: Sequence[jax.Array]) -> int:
    """The number of examples that are processed at a time, where nobody said how many.

    `one` is the number of bytes that one example takes. A CPU takes as many examples as `CACHE` bytes hold,
    but at least as many as hold eight times the bytes of the parameters, whose sums each microbatch reads and
    writes. An accelerator takes as many as half of its memory holds. Several devices take all at once, since
    slices would have to be even on each of them.
    """
    if jax.device_count() > 1 or size < 2 or not one:
        return size
    if _meshes.on_one_cpu():
        parameters = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        count = min(-(-size * one // CACHE), size * one // (8 * parameters + 1))
    else:
        memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
        count = math.ceil(2 * size * one / memory)
    return -(-size // max(1, min(count, size // 2)))


def by_microbatches(whole: Callable, step: int, batch: tuple, mask: jax.Array):
    """Runs `whole` over slices of `step` examples in turn, the last one padded, or over all at once.

    The sums of `BLOCK` slices are added up plainly, and only these with compensation, which costs little.
    """
    size, step = len(mask), max(1, step)
    if step >= size:
        return whole(batch, mask)
    count = -(-size // step)
    padding = count * step - size

    def slices(x: jax.Array) -> jax.Array:
        """Slices along axis 1, filled up with the last example."""
        last = jnp.broadcast_to(x[-1:], (padding, *x.shape[1:]))
        x = jnp.concatenate([x, last]) if padding else x
        return x.reshape(step, count, *x.shape[1:])

    def part(index: Any, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 1, False), tree)

    # Every slice takes examples from all over the batch, and so the same number from each device's shard.
    mask = jnp.pad(mask, (0, padding)).reshape(step, count)
    batch = jax.tree.map(slices, batch)
    sums, *rows = _meshes.zeros(jax.eval_shape(lambda: whole(part(0, batch), mask[:, 0])))
    rows = jax.tree.map(lambda x: jnp.stack([x] * count, 1), rows)

    def slot(index: jax.Array, state: tuple) -> tuple:
        partial, rows = state
        sums, *new = whole(*part(index, (batch, mask)))
        rows = jax.tree.map(lambda x, y: x.at[:, index].set(y), rows, new)
        return jax.tree.map(jnp.add, partial, sums), rows

    def block(index: jax.Array, state: tuple) -> tuple:
        (total, rows), first = state, index * BLOCK
        last = jnp.minimum(first + BLOCK, count)
        partial, rows = jax.lax.fori_loop(first, last, slot, (sums, rows))
        return total.add(partial), rows

    total, rows = jax.lax.fori_loop(0, -(-count // BLOCK), block, (Sum(sums, sums), rows))
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:size], rows)
    return total.result(), *rows
