"""How probable held-out texts are to a model: a score that a selection among models of text can use.

A record's own value is the geometric mean of the probabilities of its tokens. It lies in [0, 1], whatever
the model says, and depends on that record and the model alone; nats have no such bound.
"""

import math

import numpy as np

from dpx import _watch

SCORE = "record_probability"
ASSUMPTION = "the number of held-out records is public"


def score(log_probs: np.ndarray, lengths: np.ndarray) -> float:
    """The mean over records of the geometric mean of the probabilities of their tokens.

    The sum over records is exact, so that a record moves the mean by no more than `sensitivity` says.

    Args:
      log_probs: (n,) log-probability of each record; one that is not a number counts as certain absence.
      lengths: (n,) number of its tokens; a record of none is certain.
    """
    own = np.where(np.isnan(log_probs), -np.inf, log_probs).astype(np.float64)
    own = own / np.maximum(lengths, 1)
    total = math.fsum(np.minimum(np.exp(own), 1).tolist())
    return total / _watch.public(len(lengths), ASSUMPTION)


def sensitivity(count: int) -> float:
    """How far one record moves the score over so many, for a model that does not change.

    The mean of values in [0, 1] is their sum, of sensitivity 1, over their public number. Beyond that is
    what 32 bits round a value to.
    """
    return (1 + 2**-20) / _watch.public(count, ASSUMPTION)
