"""The Optax DP gradient transformation: noise on the sum of clipped gradients, once."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from dpx._numerics import norm, promoting
from dpx._validate import check_key, check_positive
from dpx.clipping import ClippedGrads
from dpx.noise import release
from dpx.noise.leaves import Bits

# Squares of thresholds, and the noise, have to stay within float32.
_LEAST, _LARGEST = float(np.finfo(np.float32).tiny), 1e38


class PrivatizeState(NamedTuple):
    """The state of `privatize`: the noise of step t is drawn from fold_in(key, t), or from given words.

    Whoever knows `key` can subtract the noise, so keep it out of checkpoints and logs.
    """

    key: Any  # None where words are given
    count: jax.Array


def _drawn_from(state: PrivatizeState, bits: Bits | None) -> jax.Array | Bits:
    """The source of a step's noise: a key that follows from the state's key, or the words that are given.

    Raises:
      ValueError: for both a key and words, or neither.
    """
    if (state.key is None) == (bits is None):
        raise ValueError(
            "bits must be given to update with key=None, and only then: draw them for each step with "
            "dpx.noise.stream.Stream"
        )
    return jax.random.fold_in(state.key, state.count) if bits is None else bits


def privatize(
    *,
    l2_clip_norm: Any,
    noise_multiplier: float | jax.Array,
    expected_batch_size: float,
    key: jax.Array | None,
    label: str = "gradients",
) -> optax.GradientTransformationExtraArgs:
    """Turns the sum of clipped per-example gradients into a private estimate of their mean.

    update = (sum + noise_multiplier · C · N(0, I)) / expected_batch_size, C the l2 sensitivity of the sum.

    Guarantee: with `noise_multiplier` as calibrated by `dpx.calibrate_dpsgd`, and examples that join a batch
    by Poisson sampling, the sequence of updates is (ε, δ)-DP for adding or removing one example. One example
    changes the sum by at most C in l2 norm, because `dpx.clipped_grad` bounds its gradient by C: by √ΣC_g²
    where groups g of parameters are clipped separately.

    Pass what `dpx.clipped_grad` returns, whole: its threshold is then compared with `l2_clip_norm`. A bare
    sum of gradients, such as one accumulated over several calls, is taken as well, on the caller's word.

        clipped = dpx.clipped_grad(loss_fn, l2_clip_norm=1.0)(params, *batch, mask=mask)
        updates, state = optimizer.update(clipped, state, params)

    The trap: pass the *sum*, not the mean. Call it once per logical batch, however many pieces that was
    accumulated from. Divide by the *expected* batch size: the realised size is private under this relation,
    and dividing by it breaks the sensitivity.

    Each of several devices draws the noise of the entries that it holds, and it is the noise that one device
    would draw. Inside `jax.shard_map`, add up the sums of all devices first.

    Args:
      l2_clip_norm: The clipping norm, or the pytree of them (one per group) that `clipped_grad` was given.
      noise_multiplier: The noise's standard deviation per unit of sensitivity; 0 gives the clipped mean.
      expected_batch_size: The sampling probability times the number of examples.
      key: A JAX key, which may be traced. Nobody who sees the updates may learn it. None where `update` is
        given `bits`, the words of a cryptographic stream for each step (`dpx.noise.stream.Stream.bits`).
      label: What the gradients are of, for `dpx.audit.replay`.

    Returns:
      An `optax.GradientTransformation`, to be chained with any optimizer. Noise is drawn in float32 (float64
      for float64 gradients) and the update has the dtype of the gradient.

    Raises:
      ValueError: in `update`, for clipped gradients whose threshold is another than `l2_clip_norm`.
      ValueError: for a clip or batch size that is not positive, a negative noise multiplier, or one of these
        that is an array of more than a number; for a key that is no JAX key.
    """
    clips = jax.tree.leaves(l2_clip_norm)
    if not clips:
        raise ValueError(
            f"l2_clip_norm={l2_clip_norm} is empty: use the clipping norm of clipped_grad"
        )
    for clip in clips:
        _check(clip, "l2_clip_norm")
        if not isinstance(clip, Tracer) and not _LEAST <= clip <= _LARGEST:
            raise ValueError(
                f"l2_clip_norm={clip} must be within the range of float32: scale the loss"
            )
    if key is not None:
        check_key(key)
    _check(noise_multiplier, "noise_multiplier", zero=True)
    _check(expected_batch_size, "expected_batch_size")
    traced = any(isinstance(clip, Tracer) for clip in clips)
    # No square of a clip may leave the range of its floats: what underflows would have no noise.
    wide = [jnp.asarray(clip, float) for clip in clips] if traced else []
    sensitivity = norm(jnp.stack(wide)) if traced else math.hypot(*clips)

    def init(params):
        del params
        return PrivatizeState(key, jnp.zeros([], jnp.int32))

    @promoting
    def update(updates, state, params=None, *, bits=None, **_):
        del params
        if isinstance(updates, ClippedGrads):
            _check_same(updates.clips, clips)
            updates = updates.grads
        _check_leaves(jax.tree.leaves(updates))
        noisy = release(
            _drawn_from(state, bits),
            updates,
            sensitivity=sensitivity,
            noise_multiplier=noise_multiplier,
            label=label,
        )
        mean = jax.tree.map(
            lambda total, leaf: (total / expected_batch_size).astype(leaf.dtype), noisy, updates
        )
        return mean, PrivatizeState(state.key, state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_same(clipped: tuple[float, ...], stated: list) -> None:
    """Raises ValueError for gradients that were clipped at another threshold than the noise covers."""
    if any(isinstance(clip, Tracer) for clip in stated):
        raise ValueError(
            "l2_clip_norm is traced, and cannot be compared with that of the clipped gradients: make it a "
            "plain number"
        )
    # In 32 bits the same number may have been rounded.
    same = len(clipped) == len(stated) and all(
        math.isclose(ours, float(theirs), rel_tol=1e-6)
        for ours, theirs in zip(clipped, stated, strict=True)
    )
    if not same:
        raise ValueError(
            f"l2_clip_norm={[float(clip) for clip in stated]} must be that of clipped_grad, "
            f"{list(clipped)}: give both the same, or the noise does not cover one example"
        )


def _check_leaves(leaves) -> None:
    """Raises ValueError for sums of complex or integer numbers, which real noise does not cover."""
    for leaf in leaves:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"updates has a leaf of dtype {dtype}, which must be a real floating-point type: pass real "
                "and imaginary parts as two arrays, and leave out what is not differentiated"
            )


def _check(value, name: str, *, zero: bool = False) -> None:
    """Checks a concrete number as `check_positive` does, and a traced one only to be a single number."""
    if not isinstance(value, Tracer):
        check_positive(value, name, zero=zero)
    elif value.ndim:
        raise ValueError(f"{name} has shape {value.shape}, which must be (): give one number")
