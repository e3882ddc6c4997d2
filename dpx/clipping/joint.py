"""Small gradients of several parameters in one array, and their sums in one array until the end.

A deep model has hundreds of biases and scales. Their sums over examples are one product of matrices here, and
the loops that the step is in carry one array for all of them, which is quicker to compile, and to run.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.clipping.parts import Parts


class Joint(NamedTuple):
    """Parameters whose gradients stand in one array, flat and one after the other, filled up with zeros.

    Attributes:
      members: their indices.
      sizes: the lengths of their gradients.
    """

    members: tuple[int, ...]
    sizes: tuple[int, ...]


def join(gradients: Mapping[int, jax.Array]) -> tuple[Joint, jax.Array]:
    """The gradients (B, *shape) of some parameters, given by index, as one array (B, total).

    Those that are looked up in long pieces come first, so that each starts where one of its pieces does.
    """
    flat = [(k, x.reshape(len(x), -1)) for k, x in gradients.items()]
    members, arrays = zip(*sorted(flat, key=lambda each: -piece(each[1].shape[1])), strict=True)
    sizes = tuple(x.shape[1] for x in arrays)
    rest = -sum(sizes) % piece(sizes[0])
    zeros = [jnp.zeros((len(arrays[0]), rest), arrays[0].dtype)] if rest else []
    return Joint(members, sizes), jnp.concatenate([*arrays, *zeros], 1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["alone", "together"],
    meta_fields=["joints", "parts"],
)
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums of gradients over examples.

    Attributes:
      alone: by the index of the parameter.
      together: (n, total) for each of the joints, n times the same.
      joints: whose sums these are.
      parts: where parameters are cut, if any are; then the sums are those of parts.
    """

    alone: dict[int, jax.Array]
    together: list[jax.Array]
    joints: tuple[Joint, ...]
    parts: Parts | None = None


def apart(sums: Any, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """The sums for parameters of these shapes, in their order, from `Sums` or a list of them."""
    if not isinstance(sums, Sums):
        return sums
    flat = dict(sums.alone)
    for joint, total in zip(sums.joints, sums.together, strict=True):
        flat |= _apart(joint, total)
    if sums.parts is not None:
        return sums.parts.whole([flat[k] for k in range(len(flat))])
    return [flat[k].reshape(shape) for k, shape in enumerate(shapes)]


def _apart(joint: Joint, total: jax.Array) -> dict[int, jax.Array]:
    """The sum, n times the same, is cut into pieces of one length, and those of a parameter are looked up.

    All look-ups of one size are one kernel to a compiler, whereas slices from different places are not.
    Neither is a look-up of one piece, whose index becomes a number in the kernel: hence two pieces or more.
    Nor is one of the very first pieces: hence the last of the equal rows.
    """
    ends = np.cumsum(joint.sizes, dtype=np.int32) + total[:-1].size
    found = {}
    for k, size, end in zip(joint.members, joint.sizes, ends, strict=True):
        length = piece(size)
        rows = np.arange((end - size) // length, end // length)
        found[k] = _rows(total.reshape(-1, length), rows)
    return found


def piece(size: int) -> int:
    """The length of a gradient's pieces: the largest power of two below its own that divides it, or one."""
    return max(1, size & -size if size & (size - 1) else size // 2)


@jax.jit  # Traced once for all parameters of one size.
def _rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    return x.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)
