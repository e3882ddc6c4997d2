"""Estimates of which of two items comes first, from noisy counts of the pair and the lateness of each item.

Few users have both items of a pair, so that the count of its order is noisy. All users of an item tell how
late in histories it stands, and late items are what comes next. This is post-processing and costs no privacy.
"""

import numpy as np

_SMALLEST_SPREAD = 0.01  # a lower bound on the variance of positions by which lateness is divided
_LEAD = 0.7  # the expected lead, before the tanh, for each standard deviation of lateness
_OPEN = 0.4  # the variance of a pair's lead about the expected one
_RAISE = 0.15  # added to the log popularity of an item for each standard deviation of lateness


def lateness(positions: np.ndarray, standard_error: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How late in histories each item comes, (K,), in standard deviations, shrunk to 0 where it is noisy.

    Let x = positions/counts have standard error e, and over items mean m and variance v. Then the lateness is
    (x − m)/√v · v/(v + e²).

    Args:
      positions, standard_error: (K,) noisy sums over users of an item's position in the history, and their
        standard errors.
      counts: (K,) positive, the number of users of each item.
    """
    if not np.isfinite(standard_error).all():  # not released
        return np.zeros(len(positions), np.float32)
    share = counts / counts.sum()
    relative, noise = positions / counts, (standard_error / counts) ** 2
    relative = relative - share @ relative
    spread = max(float(share @ (relative**2 - noise)), 0.0)
    trust = spread / np.maximum(spread + noise, np.finfo(np.float32).tiny)
    made = relative * trust / np.sqrt(max(spread, _SMALLEST_SPREAD))
    return made.astype(np.float32)


def shares(
    estimate: np.ndarray, standard_error: np.ndarray, order_weight: float, lateness: np.ndarray
) -> np.ndarray:
    """For each pair, the estimated share of co-occurrences in which i comes before j: (K, K) in [0, 1].

    Let t be the noisy count of co-occurrences, and a, of standard error e, that of i before j minus j before
    i. The lead of i, which is the share before minus the share after, is estimated by a/t, and expected from
    the lateness l of the two items as tanh(0.7 (l_j − l_i)). The result is the mean of both, where the
    expected lead has weight e²/(e² + 0.4 t²): all weight if the noise hides the order.

    Args:
      estimate, standard_error: (K, K), the noisy sums of `dpx.recommend.rounds.Round`, and their errors.
      order_weight: The factor by which entries below the diagonal were multiplied.
      lateness: (K,) l, from `lateness`.
    """
    expected = np.triu(np.tanh(_LEAD * (lateness - lateness[:, None])), 1)
    together = np.maximum(np.triu(estimate, 1), 0)
    lead = expected
    if order_weight:
        before = np.tril(estimate, -1).T / order_weight
        error = np.triu(standard_error.T, 1) / order_weight
        signal = _OPEN * together**2
        trust = signal / np.where(together > 0, signal + error**2, 1)
        seen = before / np.where(together > 0, together, 1)
        lead = np.clip(expected + trust * (seen - expected), -1, 1)
    return (1 + lead - lead.T) / 2


def raise_late(log_popularity: np.ndarray, items: np.ndarray, lateness: np.ndarray) -> np.ndarray:
    """The log (M,) of the popularity with each item multiplied by exp(0.15 lateness), as a distribution."""
    raised = log_popularity.copy()
    raised[items] += _RAISE * lateness
    return raised - np.log(np.exp(raised).sum())
