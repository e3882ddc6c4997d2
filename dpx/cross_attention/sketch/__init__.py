"""Private cross-attention from one Gaussian sketch of the memory.

What is released, and what its noise is (`memory`); how far a row moves it (`contribution`, where the
sensitivity is proven); how it is summed (`sums`); which features to take (`choice`), by the error that is
expected before anything is spent (`expected`, `simulated`).
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
