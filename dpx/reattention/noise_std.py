"""How much noise private training leaves in a parameter, and what must be known about the tokens for it."""

from typing import NamedTuple

import jax
import numpy as np

from dpx import _validate, _watch, privacy
from dpx.data.histories import Histories
from dpx.recommend import popularity


class ParameterNoise(NamedTuple):
    """Standard deviations of the noise in each row of the embedding (M,), and in every other parameter."""

    embedding: jax.Array
    rest: float | jax.Array


class TokenProbabilities(NamedTuple):
    """(M,) probability that a record holds a token, and the guarantee it was released with."""

    values: np.ndarray
    guarantee: privacy.PrivacyGuarantee


def effective_noise_std(
    noise_multiplier: float,
    batch_size: float,
    token_probability: np.ndarray | jax.Array | None = None,
    *,
    l2_clip_norm: float = 1.0,
    floor: float = 1e-6,
) -> np.ndarray:
    """Standard deviation of the noise of one DP-SGD step in a parameter (Definition 4.1, Claim 4.2).

    The noise on the sum of gradients is shared by the examples that tell something about the parameter:
    σ_eff = σ_dp · C / (B · p), p = 1 for a parameter that every example uses, and the probability that a
    record holds the token for a row of the embedding.

    Args:
      noise_multiplier: σ_dp ≥ 0.
      batch_size: Expected batch size B.
      token_probability: (M,) probabilities in [0, 1]; None for p = 1.
      l2_clip_norm: Clipping norm C.
      floor: Smallest p, for tokens that were never seen.

    Returns:
      (M,) or scalar, float32.

    Raises:
      ValueError: for an argument out of range.
    """
    noise_multiplier = _validate.check_positive(noise_multiplier, "noise_multiplier", zero=True)
    batch_size, l2_clip_norm, floor = (
        _validate.check_positive(value, name)
        for name, value in (
            ("batch_size", batch_size),
            ("l2_clip_norm", l2_clip_norm),
            ("floor", floor),
        )
    )
    p = np.asarray(1.0 if token_probability is None else token_probability, np.float64)
    if not ((p >= 0) & (p <= 1)).all():
        wrong = p[~((p >= 0) & (p <= 1))].flat[0]
        raise ValueError(f"token_probability has {wrong}, outside [0, 1]: clip noisy estimates")
    return np.asarray(
        noise_multiplier * l2_clip_norm / (batch_size * np.maximum(p, floor)), np.float32
    )


def token_probabilities(
    key: jax.Array | None,
    histories: Histories,
    *,
    epsilon: float,
    delta: float,
    max_tokens: int,
    unit: str = "user",
    secure: bool = False,
) -> TokenProbabilities:
    """Estimates privately in which share of the records each token occurs.

    Guarantee: (ε, δ)-DP for adding or removing one record. A record enters by the 0/1 vector of its distinct
    tokens, of norm √n for n of them, rescaled to norm at most √max_tokens; so one record moves the sum by at
    most √max_tokens in l2 norm, whatever the others are, and the sum is released once with Gaussian noise.
    Division by the number of records, which is taken to be public, and clipping to [0, 1] are
    post-processing. Records with more distinct tokens count less at each: by √(max_tokens/n).

    Args:
      key: Random key for the noise.
      histories: N records of tokens.
      epsilon, delta: The budget, to be charged to the ledger of the training run.
      max_tokens: Distinct tokens with which a record counts in full.
      unit: What one record is.
      secure: Sums integers and draws discrete noise (`dpx.noise.secure`); `key` must then be None.

    Raises:
      ValueError: for an argument out of range.
    """
    max_tokens = _validate.check_integer(max_tokens, "max_tokens")
    if not histories.items:
        raise ValueError("histories holds no records: there is nothing to estimate")
    noisy = popularity.fit(
        key,
        histories,
        epsilon=epsilon,
        delta=delta,
        l2_clip_norm=max_tokens**0.5,
        unit=unit,
        secure=secure,
    )
    guarantee = noisy.guarantee.assuming("the number of records is public")
    num_records = _watch.public(len(histories.items), "the number of records")
    return TokenProbabilities(np.clip(noisy.counts / num_records, 0, 1), guarantee)


def uniform_probabilities(num_tokens: int, length: int) -> np.ndarray:
    """(M,) probability that a record of `length` tokens drawn uniformly holds a token: looks at no data."""
    num_tokens = _validate.check_integer(num_tokens, "num_tokens")
    length = _validate.check_integer(length, "length")
    return np.full(num_tokens, -np.expm1(length * np.log1p(-1 / num_tokens)))
