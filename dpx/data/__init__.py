"""Data sets as arrays of token ids, and the functions that prepare them."""

from dpx.data.histories import (
    Histories,
    Split,
    first_users,
    from_events,
    k_core,
    leave_last_out,
    left_pad,
)
from dpx.data.interactions import (
    load_amazon,
    load_movielens_1m,
    load_movielens_small,
    load_table,
)
from dpx.data.records import Texts, split
from dpx.data.surnames import load_surnames
from dpx.data.synthetic import synthetic_histories
from dpx.data.text import Alphabet, load_texts

__all__ = [
    "Alphabet",
    "Histories",
    "Split",
    "Texts",
    "first_users",
    "from_events",
    "k_core",
    "leave_last_out",
    "left_pad",
    "load_amazon",
    "load_movielens_1m",
    "load_movielens_small",
    "load_surnames",
    "load_table",
    "load_texts",
    "split",
    "synthetic_histories",
]
