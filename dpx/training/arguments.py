"""Checks of the arguments of `fit`, before its folder is touched: a refused call leaves no trace there."""

import math
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from dpx import _validate
from dpx.training import adaptive
from dpx.training.privatize import PrivatizeState
from dpx.training.sampling import NAMES, Allocation, Poisson, Sampling


def check_flag(value: Any, name: str) -> bool:
    """Returns the value as a bool; raises ValueError unless it is one, of Python or of NumPy."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r} must be True or False")
    return bool(value)


def check_assumptions(assumptions: Any) -> tuple[str, ...]:
    """Returns the sentences as a tuple; raises ValueError for a single string or anything else."""
    if not isinstance(assumptions, (tuple, list)) or not all(
        isinstance(sentence, str) for sentence in assumptions
    ):
        raise ValueError(
            f"assumptions={assumptions!r} must be a tuple of sentences: write one as (sentence,)"
        )
    return tuple(assumptions)


def check_sampling(sampling: Any, batch_size: float) -> Sampling | None:
    """Returns the sampling as a value, None for "auto"; raises ValueError for one that cannot be used."""
    if isinstance(sampling, str):
        _validate.check_choice(sampling, "sampling", NAMES)
        return {"auto": None, Poisson.name: Poisson(), Allocation.name: Allocation()}[sampling]
    if not isinstance(sampling, Sampling):
        raise ValueError(
            f"sampling={sampling!r} must be one of {NAMES}, or a value: use dpx.training.Poisson() or "
            "dpx.training.Allocation()"
        )
    if sampling.max_batch_size is not None and sampling.max_batch_size < batch_size:
        raise ValueError(
            f"max_batch_size={sampling.max_batch_size} must be at least {batch_size:g}, the expected size: "
            "raise it, or most samples are cut off"
        )
    return sampling


def check_bands(
    noise: Any, bands: Any, steps: int, most: float, l2_clip_norm: Any, sampling: Sampling | None
) -> int:
    """Returns the number of bands, 1 for independent noise; raises ValueError for what excludes bands."""
    _validate.check_choice(noise, "noise", ("independent", "banded"))
    if noise == "independent":
        if bands is not None:
            raise ValueError(f"bands={bands} must come with noise='banded': leave it out")
        return 1
    if bands is None:
        raise ValueError("bands=None must be a number with noise='banded': use one from 2 on")
    bands = _validate.check_integer(bands, "bands", 2)
    if bands > min(steps, most):
        raise ValueError(
            f"bands={bands} must be at most {math.floor(min(steps, most))}, the number of steps and that of "
            "batches in the data: a step samples from one of so many groups"
        )
    if isinstance(l2_clip_norm, adaptive.AdaptiveClipNorm):
        raise ValueError(
            "noise='banded' must be 'independent' with an AdaptiveClipNorm: noise of another unit would not "
            "cancel"
        )
    if sampling not in (None, Poisson()):
        raise ValueError(
            f"sampling={sampling} must be 'poisson' or 'auto' with noise='banded', which samples from groups"
        )
    return bands


# The states of transformations that add noise of their own, or need more than one gradient.
_UNFIT = {
    PrivatizeState: "adds noise of its own: leave dpx.privatize out, since fit adds the noise",
    optax.contrib.DifferentiallyPrivateAggregateState: "clips and adds noise by itself: give the optimizer "
    "alone, such as optax.sgd, since fit does both",
    optax.LookaheadState: "keeps two copies of the parameters: give the optimizer that is in it alone",
}


def check_optimizer(optimizer: Any, params: Any, gradients: Any) -> None:
    """Raises ValueError for what is no Optax optimizer, or needs more than noisy gradients and parameters.

    Args:
      optimizer: The argument, which may be anything.
      params, gradients: Trees of arrays, or of their shapes and types; nothing is computed.
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        remedy = "use one such as optax.adam(1e-3)"
        if isinstance(optimizer, nnx.Optimizer):
            remedy = "give the one that it was made of, optimizer.tx"
        elif isinstance(optimizer, optax.MultiSteps):
            remedy = "give optimizer.gradient_transformation(), or better a larger batch_size"
        shown = repr(optimizer).splitlines()[0][:60]
        raise ValueError(f"optimizer={shown} must be an Optax optimizer: {remedy}")
    try:
        state = jax.eval_shape(optimizer.init, gradients)
        for part in jax.tree.leaves(state, is_leaf=lambda part: type(part) in _UNFIT):
            if type(part) in _UNFIT:
                raise ValueError(f"optimizer {_UNFIT[type(part)]}")

        def update(gradients: Any, state: Any, params: Any) -> Any:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        jax.eval_shape(update, gradients, state, params)
    except ValueError:
        raise
    except Exception as error:  # of anybody's code
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"optimizer must update parameters by noisy gradients alone, and failed ({reason}): one that "
            "needs losses or further gradients, such as optax.lbfgs or reduce_on_plateau, would read private "
            "data that no guarantee covers; use one such as optax.adam(1e-3)"
        ) from error


def of_one_example(params: tuple, examples: tuple, record_key: bool) -> list[Any]:
    """The shapes and types of the arguments of a loss of one example.

    Args:
      params: Trees of arrays, which are its first arguments.
      examples: Trees of arrays with one row per example.
      record_key: Whether a key is its last argument.
    """

    def abstract(x: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype))

    params = jax.tree.map(lambda x: abstract(x, x.shape), params)
    example = jax.tree.map(lambda x: abstract(x, x.shape[1:]), examples)
    key = [jax.eval_shape(jax.random.key, 0)] if record_key else []
    return [*params, *example, *key]
