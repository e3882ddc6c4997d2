"""Private training of any JAX model: `fit`, and the parts that it is made of."""

from dpx.training.adaptive import AdaptiveClipNorm
from dpx.training.fitting import Trained, fit
from dpx.training.keys import Keys, secret_key
from dpx.training.log import Record
from dpx.training.planning import Plan, plan
from dpx.training.privatize import PrivatizeState, privatize
from dpx.training.sampling import Allocation, Poisson, allocated_batches, poisson_batches

__all__ = [
    "AdaptiveClipNorm",
    "Allocation",
    "Keys",
    "Plan",
    "Poisson",
    "PrivatizeState",
    "Record",
    "Trained",
    "allocated_batches",
    "fit",
    "plan",
    "poisson_batches",
    "privatize",
    "secret_key",
]
