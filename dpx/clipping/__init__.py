"""Exact per-example gradient clipping of any JAX model.

The front door is `clipped_grad`. It takes the loss of one example, as any framework writes it,
and returns a function of a batch that sums the clipped gradients of its examples.
"""

from dpx.clipping.clipped import METHODS, ClippedGrad, clipped_grad
from dpx.clipping.explain import Explanation, explain_clipping
from dpx.clipping.randomness import record_keys
from dpx.clipping.reports import ClippingWarning
from dpx.clipping.result import ClippedGrads

__all__ = [
    "METHODS",
    "ClippedGrad",
    "ClippedGrads",
    "ClippingWarning",
    "Explanation",
    "clipped_grad",
    "explain_clipping",
    "record_keys",
]
