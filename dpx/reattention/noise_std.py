"""The noise that private training leaves in each parameter, and the token probabilities it depends on."""

from typing import NamedTuple

import jax
import numpy as np

from dpx import _validate, _watch, privacy
from dpx.data.histories import Histories
from dpx.recommend import popularity


class ParameterNoise(NamedTuple):
    """The standard deviations of the noise in each row of the embedding (M,) and in every other parameter."""

    embedding: jax.Array
    rest: float | jax.Array


class TokenProbabilities(NamedTuple):
    """The probabilities (M,) that a record holds each token, and the guarantee of their release."""

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
    """The standard deviation of the noise of one DP-SGD step in a parameter (Definition 4.1, Claim 4.2).

    The noise on the sum of gradients is divided by the number of examples that use the parameter:
    σ_eff = σ_dp · C / (B · p), where p is the probability that an example does. It is 1 for most parameters;
    for a row of the embedding it is the probability that a record holds the token.

    Args:
      noise_multiplier: σ_dp ≥ 0.
      batch_size: The expected batch size B.
      token_probability: (M,) probabilities in [0, 1]; None for p = 1.
      l2_clip_norm: The clipping norm C.
      floor: The least p, which applies to tokens that were never seen.

    Returns:
      (M,) or scalar, float32.

    Raises:
      ValueError: for an argument out of range.
    """
    noise_multiplier = _validate.check_positive(noise_multiplier, "noise_multiplier", zero=True)
    batch_size = _validate.check_positive(batch_size, "batch_size")
    l2_clip_norm = _validate.check_positive(l2_clip_norm, "l2_clip_norm")
    floor = _validate.check_positive(floor, "floor")
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
    """A private estimate of the share of records in which each token occurs.

    Guarantee: (ε, δ)-DP for adding or removing one record. A record contributes the 0/1 vector of its n
    distinct tokens, of norm √n, rescaled to norm at most √max_tokens. So one record moves the sum by at most
    √max_tokens in l2 norm, whatever the others are, and the sum is released once with Gaussian noise.
    Division by the number of records, which counts as public, and clipping to [0, 1] are post-processing. A
    record with more than max_tokens distinct tokens counts √(max_tokens/n) at each of them.

    Args:
      key: The JAX key of the noise.
      histories: N records of tokens.
      epsilon, delta: The budget, which has to be added to the ledger of the training run.
      max_tokens: The most distinct tokens with which a record counts in full.
      unit: What one record is, for the guarantee.
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
    """The probabilities (M,) that a record of `length` uniform tokens holds each token; they use no data."""
    num_tokens = _validate.check_integer(num_tokens, "num_tokens")
    length = _validate.check_integer(length, "length")
    return np.full(num_tokens, -np.expm1(length * np.log1p(-1 / num_tokens)))
