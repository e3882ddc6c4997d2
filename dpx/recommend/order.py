"""Which of two items comes first: noisy counts of the two, and how late each of them comes in general.

A pair of items has few users to tell its order, while each item has all its users to tell where in their
histories it stands, and late items are what comes next. All of this is post-processing, and costs nothing.
"""

import numpy as np

_SMALLEST_SPREAD = 0.01  # variance of positions below which items count as of one time
_LEAD = 0.7  # of an item over one that is later by one standard deviation, before the tanh
_OPEN = 0.4  # variance of a pair's lead about what the times of its items say
_RAISE = 0.15  # of the log popularity, for a standard deviation later


def lateness(positions: np.ndarray, standard_error: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(K,) how late each item comes, in standard deviations, shrunk to 0 as far as it is noise.

    With x = positions/counts of error e, of mean m and variance v, it is (x − m)/√v · v/(v + e²).

    Args:
      positions, standard_error: (K,) sums over users of where an item stands in a history, with the noise.
      counts: (K,) positive: what the sums are relative to.
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
    found: np.ndarray, standard_error: np.ndarray, order_weight: float, lateness: np.ndarray
) -> np.ndarray:
    """(K, K) in [0, 1]: of how much i and j occur together, the share of i before j.

    With t what was found of the two together, and a of the one before minus after the other, of standard
    error e, the lead (the share before minus the share after) is a/t. Weight e²/(e² + 0.4 t²) of it goes to
    what the items' times say, tanh(0.7 (l_j − l_i)): all of it where the noise lets see nothing of the order.

    Args:
      found, standard_error: (K, K), what `dpx.recommend.rounds.Round` sums, with its noise.
      order_weight: By which what is below the diagonal was multiplied.
      lateness: (K,) l, of the items.
    """
    expected = np.triu(np.tanh(_LEAD * (lateness - lateness[:, None])), 1)
    together = np.maximum(np.triu(found, 1), 0)
    lead = expected
    if order_weight:
        before = np.tril(found, -1).T / order_weight
        error = np.triu(standard_error.T, 1) / order_weight
        signal = _OPEN * together**2
        trust = signal / np.where(together > 0, signal + error**2, 1)
        seen = before / np.where(together > 0, together, 1)
        lead = np.clip(expected + trust * (seen - expected), -1, 1)
    return (1 + lead - lead.T) / 2


def raise_late(log_popularity: np.ndarray, items: np.ndarray, lateness: np.ndarray) -> np.ndarray:
    """(M,) log of a distribution: the popularity, with each item's multiplied by exp(0.15 lateness)."""
    raised = log_popularity.copy()
    raised[items] += _RAISE * lateness
    return raised - np.log(np.exp(raised).sum())
