"""One draw of normal noise for all arrays of a tree, made where each entry of them lives.

Entry i of the draw is a function of the key and of i alone. So every device makes the noise of the entries
that it holds, without a word to the others, and it is the same noise on any number of devices.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.typing import DTypeLike

from dpx._meshes import explicit_axes, mesh_of
from dpx.noise import tails

# Entries of an array up to which those of one shape are drawn as one, for fewer programs to compile: it costs
# little if they are sharded in different ways.
SMALL = 2**14

Shapes = tuple[tuple[int, ...], ...]


def normal_like(key: jax.Array, leaves: Sequence[jax.Array], dtype: DTypeLike) -> list[jax.Array]:
    """N(0, 1) draws of the shapes of `leaves`: `tails.normal` of all their entries, cut into pieces."""
    shapes = tuple(leaf.shape for leaf in leaves)
    if not shapes:
        return []
    draw = functools.partial(_by_index, shapes=shapes, dtype=jnp.dtype(dtype))
    if not (_may_be_sharded(leaves) and _has_counters(key)):
        # XLA compiles one generator, not one for each leaf, and entries share words.
        return _cut(key, shapes, dtype)
    mesh = mesh_of((key, leaves))
    if not (axes := explicit_axes(mesh)):
        return draw(key)
    layout = [jax.typeof(leaf).sharding.spec for leaf in leaves]
    with jax.sharding.use_abstract_mesh(mesh):
        laid_out: Any = jax.sharding.auto_axes(draw, axes=axes, out_sharding=layout)
        return laid_out(key)


def _cut(key: jax.Array, shapes: Shapes, dtype: DTypeLike) -> list[jax.Array]:
    sizes = list(map(math.prod, shapes))
    pieces = jnp.split(tails.normal(key, (sum(sizes),), dtype), np.cumsum(sizes)[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _may_be_sharded(leaves: Sequence[jax.Array]) -> bool:
    """Whether other devices may hold a part of what is one array here."""
    if jax.device_count() == 1 or not leaves:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or len(mesh.manual_axes) < len(mesh.axis_names)


def _has_counters(key: jax.Array) -> bool:
    """Whether JAX draws the bits of entry i by hashing i, as it does by default."""
    hashed = str(jax.random.key_impl(key)) == "threefry2x32"
    settings: Any = jax.config
    return hashed and bool(settings.jax_threefry_partitionable)


@functools.partial(jax.jit, static_argnames=("shapes", "dtype"))
def _by_index(key: jax.Array, *, shapes: Shapes, dtype: DTypeLike) -> list[jax.Array]:
    sizes = list(map(math.prod, shapes))
    columns = max(tails.count_columns(sum(sizes), dtype), 1)
    groups: dict[Any, list[int]] = {}
    for k, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        groups.setdefault(shape if size <= SMALL else k, []).append(k)
    word_key, last_key, more = jax.random.split(key, 3)
    words, column = [], []
    for members in groups.values():
        with jax.enable_x64(True):
            index = _index(shapes[members[0]], [sum(sizes[:k]) for k in members])
            words.append(_bits(word_key, *_halves(index)))
            column.append(_halves(index % np.uint64(columns)))

    def refill(state: tuple) -> tuple:
        own, more, last, empty = state
        fresh = [jnp.where(x == 0, _bits(own, *i), x) for x, i in zip(last, column, strict=True)]
        empty = [n + (x == 0) for n, x in zip(empty, last, strict=True)]
        more, own = jax.random.split(more)
        return own, more, fresh, empty

    # As `tails.fill`, but the first words come out of the loop too: what is compiled for each leaf counts.
    last = [0 * word for word in words]
    state = last_key, more, last, [x.astype(jnp.int32) - 1 for x in last]
    *_, last, empty = jax.lax.while_loop(
        lambda state: _any([x == 0 for x in state[2]]), refill, state
    )
    bits = list(zip(words, last, empty, strict=True))
    near = [tails.near(*each, dtype=dtype) for each in bits]
    draws = jax.lax.cond(
        _any([x > 0 for x in empty]),
        lambda near, bits: [
            tails.far(x, *each, dtype=dtype) for x, each in zip(near, bits, strict=True)
        ],
        lambda near, bits: near,
        near,
        bits,
    )
    found = {
        k: x[i]
        for x, group in zip(draws, groups.values(), strict=True)
        for i, k in enumerate(group)
    }
    return [found[k] for k in range(len(shapes))]


def _any(leaves: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_or, [leaf.any() for leaf in leaves], jnp.array(False))


def _index(shape: tuple[int, ...], starts: Sequence[int]) -> jax.Array:
    """The place in the draw of each entry of arrays of one shape, (arrays, *shape) uint64."""
    shape = (len(starts), *shape)
    index = jnp.array(starts, jnp.uint64).reshape(-1, *(1 for _ in shape[1:]))
    for axis in range(1, len(shape)):
        stride = np.uint64(math.prod(shape[axis + 1 :]))
        index = index + stride * jax.lax.broadcasted_iota(jnp.uint64, shape, axis)
    return index


def _halves(index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The high and the low half of 64 bits."""
    return (index >> np.uint64(32)).astype(jnp.uint32), index.astype(jnp.uint32)


def _bits(key: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """The words that `jax.random.bits(key, (n,))` has at these places, for any n beyond them."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    first, second = threefry2x32_p.bind(data[0], data[1], high, low)
    return first ^ second
