"""How probable held-out texts are to a model: a score that a selection among models of text can use.

A record's own value is the geometric mean of the probabilities of its tokens. It lies in [0, 1], whatever
the model says, and depends on that record and the model alone; nats have no such bound.
"""

import math

import numpy as np

from dpx import _watch

SCORE = "record_probability"
ASSUMPTION = "the number of held-out records, or of users where those have them, is public"


def score(log_probs: np.ndarray, lengths: np.ndarray, users: np.ndarray | None = None) -> float:
    """The mean over records of the geometric mean of the probabilities of their tokens.

    Where users have the records, it is the mean over users of the means over the records of each. The sum
    over records, or users, is exact, so that one moves the mean by no more than `sensitivity` says.

    Args:
      log_probs: (n,) log-probability of each record; one that is not a number counts as certain absence.
      lengths: (n,) number of its tokens; a record of none is certain.
      users: (n,) whose each record is, as in `dpx.data.Texts`.
    """
    own = np.where(np.isnan(log_probs), -np.inf, log_probs).astype(np.float64)
    own = np.minimum(np.exp(own / np.maximum(lengths, 1)), 1)
    if users is not None:
        own = np.minimum(np.bincount(users, own) / np.bincount(users), 1)
    return math.fsum(own.tolist()) / _watch.public(len(own), ASSUMPTION)


def sensitivity(count: int) -> float:
    """How far one record, or user, moves the score over so many, for a model that does not change.

    The mean of values in [0, 1] is their sum, of sensitivity 1, over their public number. Beyond that is
    what 32 bits round a value to.
    """
    return (1 + 2**-20) / _watch.public(count, ASSUMPTION)
