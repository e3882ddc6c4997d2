"""Private cross-attention from one Gaussian sketch of the memory.

`memory` says what is released and with which noise. `contribution` proves the sensitivity. `sums` computes
the sums. `choice` makes the features, and `expected` and `simulated` estimate the error of a release before
anything is spent.
"""

from dpx.cross_attention.sketch.choice import choose_features, even_degree
from dpx.cross_attention.sketch.contribution import sensitivity
from dpx.cross_attention.sketch.memory import Sketch, attend, build, statistic

__all__ = [
    "Sketch",
    "attend",
    "build",
    "choose_features",
    "even_degree",
    "sensitivity",
    "statistic",
]
