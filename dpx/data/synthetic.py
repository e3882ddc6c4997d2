"""Synthetic histories with a long tail and a next item that can be learned."""

import numpy as np

from dpx._validate import check_integer, check_number, check_positive
from dpx.data.histories import Histories


def synthetic_histories(
    num_users: int,
    length: int,
    num_items: int,
    *,
    zipf_exponent: float = 1.0,
    predictability: float = 0.5,
    seed: int = 0,
) -> Histories:
    """Histories of users who sometimes follow a fixed successor rule, and otherwise draw by popularity.

    The next item is the successor of the present one with probability `predictability`, and otherwise a draw
    from p(i) ∝ (i + 1)^−zipf_exponent. The successor is one fixed permutation, so that the best predictor of
    the next item is known: it has HIT@1 of at least `predictability`.

    Args:
      num_users: N.
      length: L, the number of items of each user.
      num_items: M.
      zipf_exponent: 0 is uniform; larger exponents have a shorter head.
      predictability: A probability in [0, 1].
      seed: The seed of all draws.

    Raises:
      ValueError: for an argument out of range.
    """
    for name, value in (("num_users", num_users), ("length", length), ("num_items", num_items)):
        check_integer(value, name)
    if not 0 <= check_number(predictability, "predictability") <= 1:
        raise ValueError(f"predictability={predictability} must be in [0, 1]")
    check_positive(zipf_exponent, "zipf_exponent", zero=True)
    rule, draws = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    popularity = np.arange(1, num_items + 1) ** -float(zipf_exponent)
    popularity /= popularity.sum()
    successor = rule.permutation(num_items)
    items = draws.choice(num_items, size=(num_users, length), p=popularity).astype(np.int32)
    follows = draws.random((num_users, length)) < predictability
    for position in range(1, length):
        items[:, position] = np.where(
            follows[:, position], successor[items[:, position - 1]], items[:, position]
        )
    return Histories(tuple(items), num_items)
