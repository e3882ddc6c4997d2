"""The histories of a recommender's run as arrays to train on and to rank with."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpx.data import (
    Histories,
    first_users,
    leave_last_out,
    left_pad,
    load_amazon,
    load_movielens_1m,
    load_movielens_small,
    load_table,
    synthetic_histories,
)
from dpx.data.files import kind as kind_of
from experiments.dp_transformer import training
from experiments.dp_transformer.warm_start import Start

_LARGEST_BATCH = 8192
K_CORE = (
    "which users and items pass the k-core filter is public, although one user's events can decide on "
    "whether others pass; the filter itself is not private"
)


class Prepared(NamedTuple):
    """Arrays of a run: training examples, and the users to evaluate with the item that came next.

    Tokens are items, or where the model has a `Start` those of its vocabulary.
    """

    train: Histories
    records: Histories  # the same users, as tokens
    inputs: np.ndarray  # (N, L) tokens before each target, left-padded
    targets: np.ndarray  # (N, L)
    input_mask: np.ndarray  # (N, L) real inputs
    target_mask: np.ndarray  # (N, L) targets that count in the loss
    histories: np.ndarray  # (U, L) what is known of an evaluated user
    history_mask: np.ndarray
    seen: Sequence[np.ndarray]  # U arrays, all items of that user
    next_items: np.ndarray  # (U,)
    known: Histories  # of all users, what is known where those are evaluated
    users: np.ndarray  # (U,) the numbers of the evaluated ones


def load(config) -> Histories:
    """The histories that `config.data` names."""
    data = config.data
    if {"synthetic": "num_users", "table": "user"}.get(data.kind, "min_count") not in data:
        raise ValueError(
            f"config.data.kind={data.kind!r} is not what this config reads: use "
            f"configs/recommender.py:{data.kind}"
        )
    if data.kind == "synthetic":
        return synthetic_histories(
            data.num_users,
            data.length,
            data.num_items,
            zipf_exponent=data.zipf_exponent,
            predictability=data.predictability,
            seed=config.seed,
        )
    names = ("user", "item", "time", "header", "separator", "year")
    own = tuple((name, data[name]) for name in names if name in data)
    histories = _loaded(data.kind, data.get("path"), data.min_count, own)
    if data.limit < 0:
        raise ValueError(f"config.data.limit={data.limit} must be at least 0, which is all users")
    if data.limit:
        histories = first_users(histories, data.limit)
    if max(map(len, histories.items), default=0) < 3:
        raise ValueError(
            f"config.data.path={data.get('path')!r} holds no user of three items, whose last two could be "
            "held out: give more data, or a smaller config.data.min_count"
        )
    return histories


@functools.lru_cache(maxsize=2)
def _loaded(kind: str, path: str | None, min_count: int | None, own: tuple) -> Histories:
    core: dict[str, Any] = {} if min_count is None else {"min_count": min_count}
    if kind == "movielens":
        if path is not None:
            raise ValueError(
                f"config.data.path={path!r} is not read by data.kind='movielens', which a package carries: "
                "use configs/recommender.py:table, or data.kind='movielens1m' or 'amazon'"
            )
        return load_movielens_small(**core)
    if kind == "movielens1m":
        return load_movielens_1m(path, **core)
    if kind not in ("amazon", "table"):
        raise ValueError(f"config.data.kind={kind!r} is not known: leave it as the config has it")
    if path is None:
        what = "Amazon ratings" if kind == "amazon" else "interactions, such as a .csv or .parquet"
        raise ValueError(f"config.data.path is missing: give the file of {what}")
    if kind == "amazon":
        return load_amazon(path, **dict(own), **core)
    return load_table(path, **dict(own), **core)


def with_batch_size(config, histories: Histories) -> Any:
    """The configuration with a batch size: an eighth of the users, at most 8192, where it has none."""
    if config.train.batch_size is not None:
        return config
    config = config.copy_and_resolve_references()
    num_users = training.public_size(len(histories.items))
    config.train.batch_size = min(max(1, num_users // 8), _LARGEST_BATCH)
    return config


def assumptions(config) -> tuple[str, ...]:
    """What every guarantee for these histories rests on, for how they were filtered."""
    data = config.data
    if data.kind == "synthetic":
        return ()
    # The text form of Amazon ratings is published with its 5-core filter applied.
    published_filtered = data.kind == "amazon" and kind_of(Path(data.path)) != ".csv"
    # Without a min_count the loaders filter by their own.
    filtered = published_filtered or data.min_count is None or data.min_count > 0
    return (K_CORE,) if filtered else ()


def prepare(config, start: Start | None = None, histories: Histories | None = None) -> Prepared:
    """Leave-last-out, as items or as the tokens of a start; by default of the histories that are loaded."""
    split = leave_last_out(load(config) if histories is None else histories)
    testing = config.evaluate.split == "test"
    known = split.train_and_validation if testing else split.train
    train = known if config.data.train_on_validation else split.train
    next_items = split.test if testing else split.validation
    return _tokenized(config, start, train, known, split.users, next_items)


def known_to(config, prepared: Prepared, start: Start) -> Prepared:
    """The same as the tokens of a start."""
    about = (prepared.train, prepared.known, prepared.users, prepared.next_items)
    return _tokenized(config, start, *about)


def within(config, train: Histories) -> Prepared:
    """To choose by training data alone: the last item of each training history is held out of it."""
    config = config.copy_and_resolve_references()
    config.evaluate.split, config.data.train_on_validation = "test", True
    return prepare(config, None, train)


def _tokenized(
    config,
    start: Start | None,
    train: Histories,
    known: Histories,
    users: np.ndarray,
    next_items: np.ndarray,
) -> Prepared:
    length = config.data.max_length
    records, tokens_known = train, known
    if start is not None:
        records, tokens_known = start.restrict(train), start.restrict(known)
    tokens, mask = left_pad(records.items, length + 1)
    target_mask = mask[:, 1:] & mask[:, :-1]
    if config.train.loss == "last":
        target_mask &= np.arange(length) == length - 1
    histories, history_mask = left_pad([tokens_known.items[user] for user in users], length)
    return Prepared(
        train=train,
        records=records,
        inputs=tokens[:, :-1],
        targets=tokens[:, 1:],
        input_mask=mask[:, :-1],
        target_mask=target_mask,
        histories=histories,
        history_mask=history_mask,
        seen=[known.items[user] for user in users],
        next_items=next_items,
        known=known,
        users=users,
    )
