"""dpx: differentially private attention in JAX."""

from dpx.clipping import ClippedGrads, clipped_grad

__all__ = ["ClippedGrads", "clipped_grad"]
