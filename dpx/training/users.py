"""Users who have several records each: the unit of privacy is then the user, and not the record.

A step samples users. It draws at most G records of each, anew, uniformly and without replacement, and clips
the gradient of their mean loss as that of one example. So a user moves the sum of a step by at most the
clipping norm, however many records they have, and whichever are drawn.

What is drawn for a user follows from a secret, the step, the user's number and the number of that user's
records. A user who joins or leaves changes neither the records that another one gives nor their dropout
masks.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx import _processes, _validate, _watch
from dpx.clipping import losses
from dpx.data import cells
from dpx.noise.stream import Stream
from dpx.training.layout import Layout

# The place of the words that draw users' records, beside those of `dpx.training.sampling`.
_RECORDS = 3
ASSUMPTION = cells.ONE_EACH


@dataclasses.dataclass(frozen=True, eq=False)
class Users:
    """The user of each record, and how many records of a user a step takes. Its length is that of the users.

    Attributes:
      order: (R,) int: the rows of the data, user by user. Those of one user are in the order of the data.
      begins: (N + 1,) int32: where the rows of each user begin in `order`.
      most: G, how many records of a user a step takes at most.
    """

    order: np.ndarray
    begins: np.ndarray
    most: int

    def __len__(self) -> int:
        return len(self.begins) - 1

    def sort(self, tree: Any) -> Any:
        """Sorts arrays with a row for each record, user by user."""
        return jax.tree.map(lambda x: x[self.order], tree)

    @property
    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        """(N,) each: where a user's rows begin among the sorted ones, and how many there are."""
        return self.begins[:-1], np.diff(self.begins)

    def stacked(self, example: Any) -> list[Any]:
        """The shapes and types of the arguments of a user's loss, from those of a record's loss."""

        def several(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.most, *x.shape), x.dtype)

        there = jax.ShapeDtypeStruct((self.most,), bool)
        return [there, *jax.tree.map(several, example)]


def grouped(users: Any, records_per_user: Any, rows: int) -> Users | None:
    """The users of the records that `dpx.training.fit` is given; None where each record is its own unit.

    Args:
      users: (R,) `dpx.data.cells.identifier`s, each of which is read by itself, or None.
      records_per_user: G.
      rows: R.

    Raises:
      ValueError: for an identifier that is missing or is none, naming its row; for another number of them
        than of records; and for a G that is no positive whole number.
    """
    if users is None:
        if records_per_user is not None:
            raise ValueError(
                f"records_per_user={records_per_user!r} must come with users=: say whose each record is"
            )
        return None
    if records_per_user is None:
        raise ValueError(
            "records_per_user=None must be a number with users=: it is how many records of a user a step "
            "takes at most, such as 4"
        )
    most = _validate.check_integer(records_per_user, "records_per_user")
    if not np.iterable(users) or isinstance(users, str | bytes):
        raise ValueError(f"users={users!r:.60} must be a column of identifiers: give one a record")
    codes, labels = cells.identifiers(users, "users", lambda row: f"users: row {row}")
    if len(codes) != rows:
        raise ValueError(f"users has {len(codes)} entries and data {rows} rows: give one a record")
    _check_apart(labels)
    return numbered(codes, len(labels), most)


def _check_apart(labels: np.ndarray) -> None:
    """Raises ValueError where a user has records in several processes, and would count as several users."""
    if not _processes.several():
        return
    own = [hashlib.blake2b(repr(x).encode(), digest_size=16).hexdigest() for x in labels]
    seen = Counter(itertools.chain.from_iterable(_processes.of_each(own)))
    if shared := sum(count > 1 for count in seen.values()):
        raise ValueError(
            f"users has {shared} identifiers in several processes, which must be in one alone: give all "
            "records of a user to one process"
        )


def numbered(codes: np.ndarray, count: int, records_per_user: int) -> Users:
    """The users of records, given as a number in [0, count) for each record."""
    order = np.argsort(codes, kind="stable")
    begins = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=count))])
    return Users(order, begins.astype(np.int32), records_per_user)


def mean(function: Callable[..., Any]) -> Callable[..., Any]:
    """The mean of a function over a user's records; 0 for a user without records.

    It takes a mask (G,) of the rows that hold records, and then arrays with G rows.
    """

    def of_user(there: jax.Array, *records: Any) -> jax.Array:
        values = jax.vmap(function)(*records)
        values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        return jnp.where(there, values, 0).sum() / jnp.maximum(there.sum(), 1)

    return of_user


def mean_loss(loss_fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    """The mean of a loss over a user's records, as a function of (params, frozen, there, *records)."""

    def of_user(params: Any, frozen: Any, there: jax.Array, *records: Any) -> jax.Array:
        of_record = functools.partial(loss_fn, params, frozen)
        return mean(lambda *record: losses.scalar(of_record(*record)))(there, *records)

    return of_user


def drawing(
    users: Users, data: tuple, ids: np.ndarray, layout: Layout, sampling: Any = None
) -> Callable[..., Any]:
    """A function that draws the records of a step.

    It maps (dropout, places, mask, pieces) to the batch with its keys, and to where these lie. It is a
    program of its own, which copies records and computes nothing of them. The number of each user's records
    is not public, and is in the shapes of its arguments. It is in no shape of the step: the program that
    clips and adds up, and so its rounding, is the same for other users.

    Args:
      users: The user of each record.
      data: Trees of arrays with a row for each record.
      ids: (N,) the numbers of the users, from which their keys follow.
      layout: The layout of the users.
      sampling: A stream, from which the records are drawn; otherwise the users' keys draw them.
    """
    everybody = _watch.record_ids(layout.rows)
    spans, ids = layout.records((users.spans, ids))
    held = (layout.records(users.sort(data), users.begins), *spans)

    def of_block(dropout: tuple, held: Any) -> tuple:
        (key, step), (held, ids, places, words) = dropout, held
        return draw(held, places, losses.record_keys(key, step, ids[places]), users.most, words)

    drawn = jax.jit(layout.by_block(of_block))

    def of_step(dropout: tuple, places: np.ndarray, mask: np.ndarray, pieces: int) -> tuple:
        own = np.tile(np.arange(len(places) // layout.shards, dtype=np.int32), layout.shards)
        words = None
        if isinstance(sampling, Stream):
            # Words for everybody, 4·G bytes a user: one user's draws do not depend on who else is sampled.
            words = sampling.words((everybody.max() + 1) * users.most, dropout[1], _RECORDS)
            words = words.reshape(-1, users.most)[everybody[layout.numbers(places)]]
        return drawn(dropout, (held, ids, places, words)), (own, mask, pieces)

    return of_step


def draw(
    held: Any, users: jax.Array, keys: jax.Array, most: int, words: jax.Array | None = None
) -> tuple[tuple, jax.Array]:
    """At most `most` records of each user, and a key for each of them.

    Args:
      held: Sorted records as a tuple of trees, and where each user's records begin, and how many they are.
      users: (B,) the places of users.
      keys: (B,) the keys of these users for this step.
      most: G.
      words: (B, G) random words that draw the records in place of the keys.

    Returns:
      The batch: a mask (B, G) of the places that hold records, and records with axes (B, G) in front. Then
      their keys (B, G), each of which follows from a user's key and a place among that user's records.
    """
    records, begins, counts = held

    def of_user(key: jax.Array, count: jax.Array, words: jax.Array | None) -> tuple:
        for_places, for_records = jax.random.split(key)
        places = _distinct(for_places, count, most, words)
        own = functools.partial(jax.random.fold_in, for_records)
        return places, losses.for_each(own, key.dtype, places)

    counts = counts[users]
    places, keys = losses.for_each(of_user, keys.dtype, keys, counts, words)
    there = jnp.arange(most) < counts[:, None]
    # The first user of a block begins at the block's first row.
    rows = (begins[users] - begins[0])[:, None] + places
    return (there, *jax.tree.map(lambda x: x[rows], records)), keys


def _distinct(
    key: jax.Array, count: jax.Array, most: int, words: jax.Array | None = None
) -> jax.Array:
    """(most,) distinct places in [0, count), uniformly drawn, if there are that many.

    If there are fewer, all of them are returned, and then the last one again. The algorithm is Robert Floyd's
    (CACM 30(9), 1987), whose time and memory do not depend on `count`.
    """
    few = jnp.minimum(jnp.arange(most), jnp.maximum(count - 1, 0))
    last = jnp.maximum(count - most, 0) + jnp.arange(most)
    if words is None:
        drawn = jax.random.randint(key, (most,), 0, last + 1)
    else:
        drawn = (words % (last + 1).astype(words.dtype)).astype(last.dtype)

    def add(number: jax.Array, chosen: jax.Array) -> jax.Array:
        taken = (chosen == drawn[number]).any()
        return chosen.at[number].set(jnp.where(taken, last[number], drawn[number]))

    chosen = jax.lax.fori_loop(0, most, add, jnp.full(most, -1))
    return jnp.where(count > most, chosen, few)
