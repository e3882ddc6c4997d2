"""Refuses layers that mix the examples of a batch, which no clipping of one example's gradient covers.

In training mode, batch normalisation takes its statistics from the whole batch. The loss of one example has
no batch: there the layer would normalise an example by itself alone, and what it keeps for later would be
statistics of private data without noise.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend import core

# The method of Flax (NNX and Linen), Haiku and those who write their own; frozen statistics sum nothing.
_CALL = "BatchNorm.__call__"


def check(closed: core.ClosedJaxpr) -> None:
    """Raises ValueError for a traced loss in which a BatchNorm takes statistics of what it is given.

    Found by the Python functions that made the equations of the loss, which JAX keeps for its error messages:
    a sum that was made within a method `BatchNorm.__call__`. A layer of another name, or one that a compiled
    function from elsewhere hides, is not found.
    """
    for eqn in _equations(closed.jaxpr):
        traceback = eqn.source_info.traceback
        if eqn.primitive.name == "reduce_sum" and traceback is not None:
            functions, _ = traceback.raw_frames()
            if any(function.co_qualname.endswith(_CALL) for function in functions):
                raise ValueError(
                    "loss_fn uses BatchNorm in training mode, whose statistics mix examples, so that no "
                    "clipping bounds what one of them changes: use GroupNorm or LayerNorm, or frozen "
                    "statistics (use_running_average=True)"
                )


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)
