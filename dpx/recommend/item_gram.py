"""A private item–item recommender from one release of the items' Gram matrix XXᵀ, with a column per user.

A user is the 0/1 vector of the distinct items of the history, rescaled to l2 norm at most 1: over the whole
catalogue for the popularity, and over the K kept items for a column of X. `dpx.gram.release` releases XXᵀ.
Two linear maps of a history follow from it: EASE (Steck, "Embarrassingly Shallow Autoencoders for Sparse
Data", arXiv:1905.03375), and the attention between items, D(B)⁻¹f(B).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import sparse

from dpx import gram, noise
from dpx._validate import check_positive, check_real
from dpx.data.histories import Histories
from dpx.privacy import PrivacyGuarantee, gaussian_budget, gaussian_noise_multiplier
from dpx.recommend import popularity
from dpx.release import Blocks, Partial, total


class ItemGram(NamedTuple):
    """A private release of popularity and Gram matrix, and its guarantee.

    Attributes:
      items: (K,) the numbers of the kept items, the most popular first.
      matrix: (K, K) the noisy Gram matrix of the kept items.
      log_popularity: (M,) the log of a noisy distribution over the catalogue.
      noise_std: The standard deviation of the noise on the matrix's diagonal.
      guarantee: The guarantee of popularity and matrix together.
    """

    items: np.ndarray
    matrix: np.ndarray
    log_popularity: np.ndarray
    noise_std: float
    guarantee: PrivacyGuarantee


def fit(
    key: jax.Array | None,
    histories: Histories | Blocks,
    *,
    epsilon: float,
    delta: float,
    num_kept: int | None = None,
    popularity_budget_fraction: float = 0.1,
    secure: bool = False,
) -> ItemGram:
    """Releases the popularity of all items, and the Gram matrix of the K most popular ones.

    Guarantee: (ε, δ)-DP for adding or removing one user. Both parts have l2 sensitivity exactly 1, since a
    column of norm at most 1 changes XXᵀ by at most 1 in Frobenius norm (`dpx.gram.frobenius_sensitivity`).
    They are Gaussian mechanisms with noise multipliers m/√s and m/√(1 − s), where s is the popularity's share
    of the budget and m the exact multiplier of (ε, δ); together they cost as much as one Gaussian mechanism
    with multiplier m. The kept items follow from the noisy popularity.

    Args:
      key: The JAX key of the noise.
      histories: Histories of N users over M items, or `dpx.release.Blocks` of them, which are summed twice. N
        and the catalogue count as public.
      epsilon, delta: The budget.
      num_kept: K, by default `dpx.recommend.popularity.default_num_kept`, which depends on ε, δ and N alone.
      popularity_budget_fraction: s in (0, 1).
      secure: Sums integers and draws discrete noise (`dpx.noise.secure`); `key` must then be None.

    Raises:
      ValueError: for an argument out of range.
    """
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    popularity_key, gram_key = noise.secure.split(key, secure)
    leading = popularity.leading(
        popularity_key,
        histories,
        noise_multiplier=multiplier,
        budget_fraction=popularity_budget_fraction,
        num_kept=num_kept,
        secure=secure,
    )
    items = leading.items
    # `gram.release` takes a budget, so pass the one that has the remaining noise multiplier.
    gram_epsilon, gram_delta = gaussian_budget(leading.noise_multiplier, delta)
    release = gram.release(
        gram_key,
        total(functools.partial(statistic, items=items), histories),
        epsilon=gram_epsilon,
        delta=gram_delta,
        column_bound=1.0,
        neighboring="add_or_remove_one",
        secure=secure,
    )
    assert release.noise_std is not None
    return ItemGram(
        items=items,
        matrix=np.asarray(release.matrix, np.float64),
        log_popularity=leading.log_popularity,
        noise_std=release.noise_std,
        guarantee=popularity.guarantee(
            epsilon,
            delta,
            f"noisy popularity, and the Gram matrix of {len(items)} items with noise of std "
            f"{release.noise_std:.6g}",
        ),
    )


def statistic(histories: Histories, *, items: np.ndarray) -> Partial:
    """The exact Gram matrix of those items, with a column per user. It is private data."""
    popularity.check_histories(histories)
    columns = user_vectors(histories)[:, items].T
    lengths = np.sqrt(columns.sum(axis=0))  # the norm of a 0/1 vector
    columns = columns @ sparse.diags_array(1 / np.maximum(lengths, 1))
    exact = gram.statistic(columns, column_bound=1.0)
    return dataclasses.replace(exact, options=exact.options | {"items": items})


def default_regularization(noise_std: float, num_kept: int) -> float:
    """λ = 30 + 20σ√K for EASE, where σ√(2K) is the spectral norm of the noise."""
    return 30 + 20 * noise_std * math.sqrt(num_kept)


def ease(matrix: np.ndarray, regularization: float) -> np.ndarray:
    """The item–item weights of EASE: −P_ij / P_jj with P = (G + λI)⁻¹, and a zero diagonal.

    Args:
      matrix: G, (K, K).
      regularization: λ > 0, larger than the noise's spectral norm, so that G + λI is positive definite.

    Returns:
      (K, K) weights W; a history's scores are its 0/1 row times W.

    Raises:
      ValueError: for a matrix that is not square or a λ that is not positive.
    """
    _check_square(matrix)
    check_positive(regularization, "regularization")
    matrix = np.asarray(matrix, np.float64)
    inverse = np.linalg.inv(matrix + regularization * np.eye(len(matrix)))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    return weights


def item_attention(matrix: np.ndarray, temperature: float) -> np.ndarray:
    """The attention between items, D(B)⁻¹ exp(B/temperature), where no item attends to itself.

    Args:
      matrix: B, (K, K) with K ≥ 2.
      temperature: Positive. max(1, 2σ) keeps weights from following the noise.

    Returns:
      (K, K) weights, rows summing to 1; a history's scores are its 0/1 row times these.

    Raises:
      ValueError: for a matrix that is not square with K ≥ 2, or a temperature that is not positive.
    """
    _check_square(matrix)
    check_positive(temperature, "temperature")
    if len(matrix) < 2:
        raise ValueError(f"matrix has K={len(matrix)} items: give at least 2")
    logits = np.asarray(matrix, np.float64) / temperature
    np.fill_diagonal(logits, -np.inf)
    return np.asarray(gram.attention(logits))


def scores(
    release: ItemGram, weights: np.ndarray, vectors: Any, *, prior_weight: float
) -> np.ndarray:
    """The scores of all items for each user: history times weights, plus a multiple of the log popularity.

    Args:
      release: What `fit` returned.
      weights: (K, K), from `ease` or `item_attention`.
      vectors: (U, M) 0/1 histories: a SciPy sparse array, as from `user_vectors`, or a dense one.
      prior_weight: The factor of the log popularity: for EASE σ/λ, the size of the noise in one weight.

    Returns:
      (U, M) float32.

    Raises:
      ValueError: for weights or vectors of another shape.
    """
    num_kept, num_items = len(release.items), len(release.log_popularity)
    if np.shape(weights) != (num_kept, num_kept):
        raise ValueError(
            f"weights has shape {np.shape(weights)}, which must be {(num_kept, num_kept)}: make them of "
            "release.matrix"
        )
    vectors = sparse.csr_array(vectors)
    if vectors.shape[1:] != (num_items,):
        raise ValueError(
            f"vectors has shape {vectors.shape}, which must be (U, {num_items}): number items as in the "
            "histories that were fitted"
        )
    kept = vectors[:, release.items].astype(np.float32) @ np.asarray(weights, np.float32)
    return popularity.add_to_prior(prior_weight * release.log_popularity, release.items, kept)


def user_vectors(histories: Histories) -> Any:
    """The histories as a scipy csr array (N, M), with 1 at the distinct items of each history."""
    lengths = [len(items) for items in histories.items]
    users = np.repeat(np.arange(len(lengths)), lengths)
    items = np.concatenate([np.zeros(0, np.int64), *histories.items])
    shape = (len(lengths), histories.num_items)
    vectors = sparse.csr_array((np.ones(len(items)), (users, items)), shape=shape)
    vectors.sum_duplicates()
    vectors.data[:] = 1
    return vectors


def _check_square(matrix: np.ndarray) -> None:
    check_real(matrix, "matrix")
    if np.ndim(matrix) != 2 or np.shape(matrix)[0] != np.shape(matrix)[1]:
        raise ValueError(f"matrix has shape {np.shape(matrix)}: give a square one, (K, K)")
