"""One draw of noise for all arrays of a tree, made where each of their entries lives.

Entry i of the draw is a function of the key and of i alone. So every device makes the noise of the entries
that it holds, without a word to the others, and it is the same noise on any number of devices.

In place of a key a draw may be given all of its random words (`Bits`), which lie where the entries do.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from dpx._meshes import explicit_axes, mesh_of
from dpx.noise import lattice

# The most entries of an array that is drawn as one with others of its shape, which compiles fewer programs.
SMALL = 2**14
FURTHER = 16  # words for draws that are far out, where no key gives more

Shapes = tuple[tuple[int, ...], ...]


class Draw(NamedTuple):
    """The arguments of `lattice.add` for each entry: its noise, and the number that decides its rounding."""

    normal: jax.Array
    uniform: jax.Array


class Bits(NamedTuple):
    """The random words of one draw, in place of a key. Groups of arrays (`_groups`) share no words.

    Attributes:
      words: For each group two words for each entry, (arrays, *shape), and two for each column of sixteen
        entries that follow one another, (columns,).
      further: For each group (FURTHER,) words that its draws share, for those that are far out, one in 2⁵⁵.
        The tail ends where all of these words are zero, at 28 standard deviations.
    """

    words: tuple[lattice.Words, ...]
    further: tuple[jax.Array, ...]


def word_shapes(shapes: Shapes) -> list[tuple[tuple[int, ...], int]]:
    """For each group of arrays of these shapes, the shape of its entries' words and the number of columns."""
    own = [(len(members), *shapes[members[0]]) for members in _groups(shapes)]
    return [(shape, max(1, count_columns(math.prod(shape)))) for shape in own]


def draws_like(key: jax.Array | Bits, leaves: Sequence[jax.Array]) -> list[Draw]:
    """A draw for each entry of `leaves`, as if one array of all entries were drawn and cut into pieces."""
    shapes = tuple(leaf.shape for leaf in leaves)
    if not shapes:
        return []
    if isinstance(key, Bits):
        _check_fits(key, shapes)
        draw = functools.partial(_of_bits, shapes=shapes)
    elif _may_be_sharded(leaves) and _has_counters(key):
        draw = functools.partial(_by_index, shapes=shapes)
    else:
        # XLA compiles one generator, not one for each leaf, and entries share words.
        return _cut(key, shapes)
    mesh = mesh_of((key, leaves))
    if not (axes := explicit_axes(mesh)):
        return draw(key)
    layout = [Draw(*[jax.typeof(leaf).sharding.spec] * 2) for leaf in leaves]
    with jax.sharding.use_abstract_mesh(mesh):
        laid_out: Any = jax.sharding.auto_axes(draw, axes=axes, out_sharding=layout)
        return laid_out(key)


@functools.partial(jax.jit, static_argnames="shapes")
def _cut(key: jax.Array, shapes: Shapes) -> list[Draw]:
    sizes = list(map(math.prod, shapes))
    columns = max(count_columns(sum(sizes)), 1)
    own_key, shared_key, more = jax.random.split(key, 3)

    def words() -> list[lattice.Words]:
        # Flat words: XLA compiles a generator much longer for an array with axes.
        own = [word.reshape(-1, columns) for word in _pair(own_key, lattice.SHARING * columns)]
        return [lattice.Words(*own, *[word[None] for word in _pair(shared_key, columns)])]

    def fresh(key: jax.Array) -> list[jax.Array]:
        return [_pair(key, columns)[0][None]]

    (draw,) = _drawn(words, functools.partial(_refilled, fresh, more))
    cuts = np.cumsum(sizes)[:-1]
    pieces = zip(*(jnp.split(x.ravel()[: sum(sizes)], cuts) for x in draw), strict=True)
    return [
        Draw(*(x.reshape(shape) for x in piece))
        for piece, shape in zip(pieces, shapes, strict=True)
    ]


def count_columns(draws: int) -> int:
    """The number of columns that this many draws fill row by row. The draws of a column share words."""
    return -(-draws // lattice.SHARING)


def _drawn(
    words: Callable[[], list[lattice.Words]],
    further: Callable[[list[lattice.Words]], list[tuple[jax.Array, jax.Array]]],
) -> list[Draw]:
    """The draws of groups, from their words and, where a draw is far out, from those that `further` gives.

    `further` returns for each group the next word that is not zero, and how many words of zeros precede it.
    """
    near = [lattice.whole_normal(each) for each in words()]

    def far(near: list[jax.Array]) -> list[jax.Array]:
        again = words()  # hashed again, or they would be kept for this
        return [
            lattice.whole_normal(each, lattice.far_size(each, *more))
            for each, more in zip(again, further(again), strict=True)
        ]

    is_far = _any([lattice.may_be_far(x) for x in near])
    whole = jax.lax.cond(is_far, far, lambda near: near, near)
    return [Draw(x, lattice.uniforms(each)) for x, each in zip(whole, words(), strict=True)]


def _refilled(
    fresh: Callable[[jax.Array], list[jax.Array]], key: jax.Array, words: list[lattice.Words]
) -> list[tuple[jax.Array, jax.Array]]:
    """For each column the first word of `fresh` that is not zero, and how many words of zeros precede it."""

    def refill(state: tuple) -> tuple:
        key, last, empty = state
        key, own = jax.random.split(key)
        filled = [jnp.where(x == 0, y, x) for x, y in zip(last, fresh(own), strict=True)]
        return key, filled, [n + (x == 0) for n, x in zip(empty, filled, strict=True)]

    zeros = [jnp.zeros_like(each.low_size) for each in words]
    state = key, zeros, [x.astype(jnp.int32) for x in zeros]
    _, last, empty = jax.lax.while_loop(
        lambda state: _any([x == 0 for x in state[1]]), refill, state
    )
    return list(zip(last, empty, strict=True))


def _may_be_sharded(leaves: Sequence[jax.Array]) -> bool:
    """Whether other devices may hold a part of an array."""
    if jax.device_count() == 1 or not leaves:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or len(mesh.manual_axes) < len(mesh.axis_names)


def _has_counters(key: jax.Array) -> bool:
    """Whether the bits of entry i are a hash of i, as they are with JAX's default generator."""
    return str(jax.random.key_impl(key)) == "threefry2x32"


@functools.partial(jax.jit, static_argnames="shapes")
def _by_index(key: jax.Array, *, shapes: Shapes) -> list[Draw]:
    sizes = list(map(math.prod, shapes))
    columns = max(count_columns(sum(sizes)), 1)
    groups = _groups(shapes)
    own_key, shared_key, more = jax.random.split(key, 3)
    with jax.enable_x64(True):
        indices = [
            _index(shapes[members[0]], [sum(sizes[:k]) for k in members]) for members in groups
        ]
        places = [_halves(index) for index in indices]
        column = [_halves(index % np.uint64(columns)) for index in indices]

    def words() -> list[lattice.Words]:
        return [
            lattice.Words(*_hashed(own_key, *place), *_hashed(shared_key, *shared))
            for place, shared in zip(places, column, strict=True)
        ]

    def fresh(key: jax.Array) -> list[jax.Array]:
        return [_hashed(key, *place)[0] for place in column]

    return _apart(_drawn(words, functools.partial(_refilled, fresh, more)), groups)


@functools.partial(jax.jit, static_argnames="shapes")
def _of_bits(bits: Bits, *, shapes: Shapes) -> list[Draw]:
    with jax.enable_x64(True):  # the place of an entry in its group may have more than 32 bits
        column = []
        for (count, *shape), _ in word_shapes(shapes):
            index = _index(tuple(shape), [k * math.prod(shape) for k in range(count)])
            column.append((index // np.uint64(lattice.SHARING)).astype(jnp.uint32))

    def words() -> list[lattice.Words]:
        return [
            lattice.Words(each.size, each.rounding, each.low_size[own], each.low_rounding[own])
            for each, own in zip(bits.words, column, strict=True)
        ]

    def further(words: list[lattice.Words]) -> list[tuple[jax.Array, jax.Array]]:
        del words
        empty = [jnp.argmax(each != 0).astype(jnp.int32) for each in bits.further]
        return [(each[count], count) for each, count in zip(bits.further, empty, strict=True)]

    return _apart(_drawn(words, further), _groups(shapes))


def _check_fits(bits: Bits, shapes: Shapes) -> None:
    """Raises ValueError for words that were drawn for arrays of other shapes."""
    needed = [(own, own, (count,), (count,)) for own, count in word_shapes(shapes)]
    given = [tuple(x.shape for x in each) for each in bits.words]
    if given != needed:
        raise ValueError(
            f"bits are for groups {given}, which must be {needed}: draw them for these arrays"
        )


def _groups(shapes: Shapes) -> list[list[int]]:
    """The arrays that are drawn together, by number: small ones of one shape, and each other by itself."""
    groups: dict[Any, list[int]] = {}
    for k, shape in enumerate(shapes):
        groups.setdefault(shape if math.prod(shape) <= SMALL else k, []).append(k)
    return list(groups.values())


def _apart(draws: list[Draw], groups: list[list[int]]) -> list[Draw]:
    """The draws of each array, from the draws of the groups."""
    by_array = {
        k: Draw(draw.normal[i], draw.uniform[i])
        for draw, members in zip(draws, groups, strict=True)
        for i, k in enumerate(members)
    }
    return [by_array[k] for k in range(len(by_array))]


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


def _pair(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Two random words for each of `count` places, (count,) uint32 each."""
    if not _has_counters(key):
        first, second = jax.random.split(key)
        return (
            jax.random.bits(first, (count,), jnp.uint32),
            jax.random.bits(second, (count,), jnp.uint32),
        )
    if count <= 2**32:
        low = jax.lax.iota(jnp.uint32, count)
        return _hashed(key, jnp.zeros_like(low), low)
    with jax.enable_x64(True):
        high, low = _halves(jax.lax.iota(jnp.uint64, count))
    return _hashed(key, high, low)


def _hashed(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The block of two words that JAX's default generator makes of a key and a place."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    first, second = threefry2x32_p.bind(data[0], data[1], high, low)
    return first, second
