"""Clipping thresholds: one for all parameters, or one for each group of them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from dpx._validate import check_positive
from dpx.clipping import params
from dpx.clipping.rounding import gamma

# The stabiliser γ in g·C/(‖g‖ + γ), as in Bu et al., Automatic Clipping (arXiv:2206.07136).
NORMALIZE_GAMMA = 0.01
# The range of thresholds: their squares, and those of norms near them, are normal float32 numbers.
BOUNDS = (1e-12, 1e12)
# The least clip factor that is used.
SMALLEST = 2.0**-48


class Groups(NamedTuple):
    """Thresholds C_g and the group of every parameter array.

    Attributes:
      clips: one threshold per group.
      structure: the tree structure of the thresholds.
      members: for each parameter array, in tree order, the index of its group.
    """

    clips: tuple[float, ...]
    structure: Any
    members: tuple[int, ...]


def check_clip(l2_clip_norm: Any) -> tuple[float, ...]:
    """The thresholds in `l2_clip_norm`, or ValueError unless all are numbers within `BOUNDS`."""
    clips = jax.tree.leaves(l2_clip_norm)
    if not clips:
        raise ValueError(f"l2_clip_norm={l2_clip_norm!r} holds no threshold: pass a number.")
    for clip in clips:
        if isinstance(clip, Tracer):
            raise ValueError(f"l2_clip_norm={clip!r} must be a plain number, known before tracing.")
        check_positive(clip, "l2_clip_norm")
        if not BOUNDS[0] <= float(clip) <= BOUNDS[1]:
            raise ValueError(
                f"l2_clip_norm={clip!r} must be between {BOUNDS[0]:g} and {BOUNDS[1]:g}: to clip elsewhere, "
                "scale the loss."
            )
    return tuple(float(clip) for clip in clips)


def assign(l2_clip_norm: Any, tree: Any) -> Groups:
    """Matches the thresholds, a prefix of the parameter tree, with its arrays.

    A subtree in which nothing is differentiated may have None for a threshold.

    Raises:
      ValueError: `l2_clip_norm` is not a prefix of `tree`; an array has no threshold, or a threshold no
        array.
    """
    clips = check_clip(l2_clip_norm)
    message = "l2_clip_norm={} is not a prefix of the parameter tree {}; give one number, or one for each "
    members = params.spread(l2_clip_norm, tree, message + "subtree: {}")
    if unused := sorted(set(range(len(clips))) - set(members)):
        raise ValueError(
            f"l2_clip_norm={l2_clip_norm!r} has a threshold, {clips[unused[0]]}, for parameters that are not "
            "trained, which would only add noise: give None there, or leave it out"
        )
    return Groups(clips, jax.tree.structure(l2_clip_norm), tuple(members))


def group_norms(groups: Groups, squared_norms: Sequence[tuple[int, jax.Array]]) -> list[jax.Array]:
    """Gradient norms by group, (B,) each; infinite where anything in the group is not finite.

    `squared_norms` are pairs of a group and (B,) squared norms of a part of its gradients.
    """
    norms = []
    for index in range(len(groups.clips)):
        mine = [squared for group, squared in squared_norms if group == index]
        dtype = jnp.result_type(*mine)
        # One array: XLA would compile a kernel for each of several.
        squares = jax.lax.optimization_barrier(jnp.stack([x.astype(dtype) for x in mine]))
        total = jnp.sum(squares, 0)
        # Above the exact root of the exact sum by what the clip factor and its product round, too: that of
        # a gradient in float32 in 32 bits, also in a group with others in 64.
        slack = max(gamma(len(squares) + 24, x.dtype) for x in mine)
        norm = jnp.sqrt(total) * (1 + slack)
        norms.append(jnp.where(jnp.isfinite(total), norm, jnp.inf))
    return norms


def clip_factors(
    groups: Groups, norms: Sequence[jax.Array], keep: jax.Array, normalize: bool
) -> list[jax.Array]:
    """The factor of each example's gradient, by group: min(1, C/‖g‖), or C/(‖g‖ + γ); 0 unless in `keep`.

    A factor below `SMALLEST`, in the units of the sums, is zero: smaller ones could scale entries to where
    they are flushed to zero, which is an error that no multiple of the gradient's length bounds.

    With `normalize` the factors, and so the sums, are in units of `unit_of`, and no factor is above 1. The
    quotient comes last, because XLA computes anything cheaper again in the sum of every parameter.
    """
    factors = []
    for clip, norm in zip(groups.clips, norms, strict=True):
        if normalize:
            length, clip = norm + NORMALIZE_GAMMA, clip / unit_of(clip)
        else:
            length = jnp.maximum(norm, clip)
        counts = keep & (length <= clip / SMALLEST)
        factors.append(jnp.where(counts, clip, 0.0).astype(norm.dtype) / length)
    return factors


def unit_of(clip: float) -> float:
    """The unit of normalized sums: a power of two, by which division rounds nothing, of at least C/γ.

    Factors of up to C/γ = 100 C could make an entry of a finite gradient's factors infinite, and so the sum.
    """
    return 2.0 ** math.ceil(math.log2(max(clip / NORMALIZE_GAMMA, 1.0)))
