"""Sums over a part of the records, which merge exactly and have no noise.

**Exact.** A record's contribution is rounded to integers before it is added (`dpx.noise.secure`). Sums of
integers are associative, and sums of floats, even compensated ones, are not. So the total is the same to the
last bit however records are cut into blocks and blocks are merged. The sensitivity allows for the rounding.

**Private.** A `Partial` has no noise and no guarantee: whoever sees one sees private data, so it must stay
with the holders of the data. Only the release of the total has a guarantee, the same as for records given
directly: a record's contribution is bounded whatever block it lies in, and enters the total once. For that
each record has to lie in exactly one block. If the record is a user, all events of a user must be in one
block: a user who is spread over k blocks counts as k records and has k times the declared sensitivity.
Names make sure that no *block* counts twice.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Statistic = Callable[[Any], "Partial"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Partial:
    """The exact sum of the contributions of some records, rounded to integers: it is private data.

    Attributes:
      statistic: The name of what is summed.
      options: All that contributions depend on beside the records (clip norms, sizes, earlier releases). It
        is public, and the same in all parts.
      sums: int64 arrays. They are private.
      num_records: The number of records.
      largest: A bound on the l2 norm of a record's contribution.
      blocks: The names of the blocks that are summed; empty until `as_block` names the sum.
    """

    statistic: str
    options: dict[str, Any]
    sums: tuple[np.ndarray, ...]
    num_records: int
    largest: int
    blocks: frozenset[str] = frozenset()

    def __post_init__(self):
        if self.num_records * self.largest >= 2**62:
            raise ValueError(
                f"num_records={self.num_records} must be less than {2**62 // self.largest} for an exact "
                f"64-bit sum of the {self.statistic}: release two halves of the records, each from its own"
            )

    def __repr__(self) -> str:
        return f"Partial({self.statistic!r}, {len(self.blocks)} blocks: private data, no guarantee)"

    def as_block(self, name: str) -> "Partial":
        """The same sum under the name of its block; `merge` uses names to see that no block counts twice.

        Raises:
          ValueError: unless the name is a string that is not empty, or if the sum has a name already.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"name={name!r} must be a string that is not empty: name the block")
        if self.blocks:
            raise ValueError(f"name={name!r} must be left out: this sum has a name already")
        return dataclasses.replace(self, blocks=frozenset([name]))

    def check(self, statistic: str, **options) -> "Partial":
        """Returns itself; raises ValueError if it is another statistic or has other options."""
        if self.statistic != statistic:
            raise ValueError(f"total={self} must be of the {statistic}: sum what is to be released")
        for name, value in options.items():
            if not _same(self.options[name], value):
                raise ValueError(
                    f"{name}={value!r} must be {self.options[name]!r}, with which the {statistic} was "
                    "summed: use one value for both"
                )
        return self


def merge(one: Partial, other: Partial) -> Partial:
    """The sum over the records of both parts. Merging is associative and commutative to the last bit.

    Raises:
      ValueError: for parts without names, for a block that is in both, and for parts of different statistics
        or options.
    """
    for part in (one, other):
        if not isinstance(part, Partial):
            raise ValueError(
                f"part={type(part).__name__} must be a Partial: pass what `statistic` returns"
            )
        if not part.blocks:
            raise ValueError(f"part={part} must have a name: use part.as_block(name)")
    if twice := sorted(one.blocks & other.blocks):
        raise ValueError(
            f"blocks={twice[:3]} must be in one of the two parts: each block counts once"
        )
    if one.statistic != other.statistic or not _same(one.options, other.options):
        raise ValueError(
            f"part={other} must be of the same statistic, with the same options and sizes, as {one}: "
            "sum all blocks in the same way"
        )
    return dataclasses.replace(
        one,
        sums=tuple(a + b for a, b in zip(one.sums, other.sums, strict=True)),
        num_records=one.num_records + other.num_records,
        largest=max(one.largest, other.largest),
        blocks=one.blocks | other.blocks,
    )


def _same(one: Any, other: Any) -> bool:
    (ours, structure), (theirs, same) = jax.tree.flatten(one), jax.tree.flatten(other)
    return structure == same and all(map(np.array_equal, ours, theirs))
