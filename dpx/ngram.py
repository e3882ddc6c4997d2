"""n-gram language models from one Gaussian release of clipped counts."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from dpx import _validate, privacy
from dpx.data import cells
from dpx.noise import release_integers, sum_sparse
from dpx.noise import secure as exact_arithmetic
from dpx.release import Blocks, Partial, total

_MAX_CELLS = 10**8


class NGram(NamedTuple):
    """Next-token probabilities for every context of n − 1 tokens, and their guarantee."""

    probabilities: np.ndarray  # (V^(n-1), V)
    order: int
    start: int
    guarantee: privacy.PrivacyGuarantee

    def log_prob(self, tokens: np.ndarray) -> np.ndarray:
        """The log-probability of each token given those before it: (N, L) int -> (N, L), in nats.

        Raises:
          ValueError: for a number that is not a token of the vocabulary; padding has to be one too.
        """
        vocab_size = self.probabilities.shape[1]
        tokens, _ = _checked(tokens, np.ones(np.shape(tokens), bool), vocab_size)
        cells = _cells(tokens, self.order, vocab_size, self.start)
        return np.log(self.probabilities.ravel()[cells])


def fit(
    key: jax.Array | None,
    tokens: np.ndarray | Blocks | Partial,
    mask: np.ndarray | None,
    *,
    order: int,
    vocab_size: int,
    start: int,
    epsilon: float,
    delta: float,
    unit: str,
    users: np.ndarray | None = None,
    l2_clip_norm: float = 2.0,
    secure: bool = False,
) -> NGram:
    """An n-gram model from one private release of counts, which are then smoothed.

    Guarantee: (ε, δ)-DP for adding or removing one sequence, or with `users` one user with all of their
    sequences. The vector of counts over the V^n cells, of a sequence or of all sequences of a user, is
    rescaled to l2 norm at most `l2_clip_norm`. So it moves the sum by no more than that, whatever the others
    are and however many sequences a user has. The sum is released with Gaussian noise of the exact noise
    multiplier. Smoothing is post-processing: counts below half a noise deviation become zero, and each
    context backs off to the context that is a token shorter, whose counts are sums over the same release.

    Args:
      key: The JAX key of the noise.
      tokens: (N, L) int, one sequence a row; or `dpx.release.Blocks` of what `statistic` takes, or a sum that
        it made.
      mask: (N, L) bool, the tokens to count (a prefix of each row); None with blocks.
      order: n ≥ 1.
      vocab_size: V.
      start: The token that stands for the tokens before a sequence.
      epsilon, delta: The budget.
      unit: What one row is, or what a user is, for the guarantee.
      users: (N,) int, the number, at least 0, of the user to whom each row belongs.
      l2_clip_norm: The largest l2 norm of the counts of one sequence, or of one user.
      secure: Sums integers and draws discrete noise (`dpx.noise.secure`); `key` must then be None.

    Raises:
      ValueError: for arguments out of range, or a table of more than 1e8 cells.
    """
    table = _checked_table(order, vocab_size, start, l2_clip_norm)
    multiplier = privacy.gaussian_noise_multiplier(epsilon, delta)
    exact_arithmetic.check(key, secure)
    users_too = () if users is None else (users,)
    summed = total(functools.partial(statistic, **table), tokens, mask, *users_too)
    (counts,) = summed.check("n-gram counts", **table).sums
    order, vocab_size, start, l2_clip_norm = table.values()
    noisy = release_integers(
        key,
        counts,
        sensitivity=summed.largest,
        unit=l2_clip_norm / exact_arithmetic.STEPS,
        noise_multiplier=multiplier,
        label=f"{order}-gram counts",
    )
    guarantee = privacy.gaussian_guarantee(
        epsilon,
        delta,
        neighboring=privacy.ADD_OR_REMOVE_ONE,
        unit=unit,
        mechanism=f"{order}-gram counts, clipped to l2 norm {l2_clip_norm:g}, one Gaussian release with "
        f"noise multiplier {multiplier:.6g}",
        assumptions=(cells.ONE_EACH,) if summed.options["of_users"] else (),
    )
    std = multiplier * l2_clip_norm
    return NGram(_smooth(np.asarray(noisy), order, vocab_size, std), order, start, guarantee)


def statistic(
    block: tuple[np.ndarray, ...],
    *,
    order: int,
    vocab_size: int,
    start: int,
    l2_clip_norm: float = 2.0,
) -> Partial:
    """The exact sum of clipped n-gram counts of sequences, or of users. It is private data.

    Args:
      block: Tokens and mask, (N, L) each; blocks may have different N and L. If the unit is a user, also the
        users (N,) int of the rows, in all blocks: all rows of one user have to be in one of them.
      order, vocab_size, start, l2_clip_norm: As in `fit`.

    Raises:
      ValueError: for arguments out of range; unless tokens that the mask keeps are integers in
        [0, vocab_size), the mask is bool and keeps a prefix of each row, both are (N, L), and users are (N,)
        whole numbers.
    """
    table = _checked_table(order, vocab_size, start, l2_clip_norm)
    order, vocab_size, start, l2_clip_norm = table.values()
    tokens, mask, users = (*block, None)[:3]
    tokens, mask = _checked(tokens, mask, vocab_size)
    size = vocab_size**order
    owner, count = _owners(len(tokens), users)
    cells = _cells(tokens, order, vocab_size, start)[mask]
    # Each distinct cell of an owner once, with the number of its occurrences.
    places, repeats = np.unique(owner[np.nonzero(mask)[0]] * size + cells, return_counts=True)
    owners, cells = np.divmod(places, size)
    norms = np.sqrt(np.bincount(owners, repeats.astype(float) ** 2, count))
    weights = np.minimum(1, l2_clip_norm / np.maximum(norms, 1))
    counts, largest = sum_sparse(
        repeats * weights[owners], owners, cells, size, l2_clip_norm=l2_clip_norm
    )
    options = table | {"of_users": users is not None}
    return Partial("n-gram counts", options, (counts,), count, largest)


def without_privacy(
    tokens: np.ndarray, mask: np.ndarray, *, order: int, vocab_size: int, start: int
) -> np.ndarray:
    """The probabilities (V^(n-1), V) from exact counts, without any guarantee, for comparison.

    Raises:
      ValueError: as `statistic`.
    """
    order, vocab_size, start, _ = _checked_table(order, vocab_size, start, 1.0).values()
    tokens, mask = _checked(tokens, mask, vocab_size)
    cells = _cells(tokens, order, vocab_size, start)[mask]
    counts = np.bincount(cells, minlength=vocab_size**order).astype(float)
    return _smooth(counts, order, vocab_size, 0.0)


def check_cells(order: int, vocab_size: int) -> None:
    """Raises ValueError for an order whose table has more than 1e8 cells."""
    if order > 64 or vocab_size**order > _MAX_CELLS:
        raise ValueError(
            f"order={order} with vocab_size={vocab_size} must be at least 1 and give at most "
            f"{_MAX_CELLS} cells: use a smaller order"
        )


def _checked_table(order, vocab_size, start, l2_clip_norm) -> dict[str, Any]:
    """The four arguments as numbers, by name; raises ValueError if they are out of range.

    A start that is not a token would be counted in the cell of another n-gram, beside that n-gram's own
    count.
    """
    order = _validate.check_integer(order, "order")
    vocab_size = _validate.check_integer(vocab_size, "vocab_size")
    start = _validate.check_integer(start, "start", 0)
    if start >= vocab_size:
        raise ValueError(f"start={start} must be a token, less than vocab_size={vocab_size}")
    check_cells(order, vocab_size)
    return {
        "order": order,
        "vocab_size": vocab_size,
        "start": start,
        "l2_clip_norm": _validate.check_clip_of_counts(l2_clip_norm),
    }


def _owners(rows: int, users: np.ndarray | None) -> tuple[np.ndarray, int]:
    """The owner (N,) of each row, a sequence or a user, numbered from 0, and the number of owners."""
    if users is None:
        return np.arange(rows), rows
    _validate.check_unmasked(users, "users")
    users = np.asarray(users)
    if users.shape != (rows,) or users.dtype.kind not in "iu":
        raise ValueError(
            f"users of shape {users.shape} and dtype {users.dtype} must be ({rows},) whole numbers: give the "
            "user of each row"
        )
    known, owners = np.unique(users, return_inverse=True)
    return owners, len(known)


def _checked(tokens, mask, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask as arrays, with numbers that are not tokens replaced where the mask is False.

    Such a number would otherwise be the index of another n-gram's cell, and be counted there.
    """
    _validate.check_real(tokens, "tokens")
    _validate.check_real(mask, "mask")
    tokens, mask = np.asarray(tokens), np.asarray(mask)
    if tokens.ndim != 2 or mask.shape != tokens.shape or not tokens.shape[1]:
        raise ValueError(
            f"tokens and mask have shapes {tokens.shape} and {mask.shape}, which must be one shape (N, L) "
            "with L ≥ 1: give a row for each sequence"
        )
    if mask.dtype != bool:
        raise ValueError(f"mask of dtype {mask.dtype} must be bool, True for a token")
    if np.any(mask[:, 1:] & ~mask[:, :-1]):
        raise ValueError(
            "mask must be True at a prefix of each row, since padding would count as what comes before: move "
            "the tokens to the left"
        )
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens of dtype {tokens.dtype} must be integers in [0, {vocab_size})")
    if np.any(mask & ((tokens < 0) | (tokens >= vocab_size))):
        raise ValueError(f"tokens must be in [0, {vocab_size}): clip or leave out the others")
    return np.where(mask, tokens, 0), mask


def _cells(tokens: np.ndarray, order: int, vocab_size: int, start: int) -> np.ndarray:
    """The index (N, L) in the table of the n-gram that ends at each position."""
    before = np.full((len(tokens), order - 1), start)
    padded = np.concatenate([before, tokens], axis=1).astype(np.int64)
    cells = np.zeros(tokens.shape, np.int64)
    for offset in range(order):
        cells = cells * vocab_size + padded[:, offset : offset + tokens.shape[1]]
    return cells


def _smooth(noisy: np.ndarray, order: int, vocab_size: int, std: float) -> np.ndarray:
    """The probabilities (V^(n-1), V): soft-thresholded counts, interpolated with shorter contexts."""
    tables = [(noisy, std)]
    for _ in range(order - 1):
        table, std = tables[-1]
        tables.append((table.reshape(vocab_size, -1).sum(axis=0), std * np.sqrt(vocab_size)))
    probabilities = np.full((1, vocab_size), 1 / vocab_size)
    for table, std in reversed(tables):
        counts = np.maximum(table.reshape(-1, vocab_size) - std / 2, 0)
        prior = np.tile(probabilities, (len(counts) // len(probabilities), 1))
        # About as many pseudo-counts as noise alone could have made in one row.
        strength = max(20 * std, 0.5)
        probabilities = (counts + strength * prior) / (counts.sum(axis=1, keepdims=True) + strength)
    return probabilities
