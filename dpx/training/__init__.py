"""Private training of any JAX model: one noisy Optax transformation, Poisson sampling, the loop."""

from dpx.training.sampling import poisson_batches
from dpx.training.transformation import PrivatizeState, privatize

__all__ = ["PrivatizeState", "poisson_batches", "privatize"]
