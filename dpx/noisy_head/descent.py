"""Algorithm 1, which is private gradient descent on the head's matrix Γ, and the same without privacy."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from optax import projections

from dpx._numerics import as_float64, in_float64
from dpx._validate import check_choice, check_finite, check_integer, check_key, check_positive
from dpx.noisy_head.accounting import Descent
from dpx.noisy_head.prompts import Features, check_features
from dpx.noisy_head.second_moments import gradient_sum
from dpx.noisy_head.sensitivity import DECAY, HyperParameters, enforce
from dpx.privacy import PrivacyGuarantee
from dpx.training.privatize import privatize


class Fit(NamedTuple):
    """A private Γ (D, D), its guarantee, and the noise std that was used, per unit of l2 sensitivity."""

    gamma: jax.Array
    guarantee: PrivacyGuarantee
    noise_multiplier: float


@in_float64
def fit(
    key: jax.Array,
    features: Features,
    hyper: HyperParameters,
    *,
    regularization: float,
    step_size: float,
    steps: int,
    epsilon: float,
    delta: float,
    accounting: str = "gdp",
    sensitivity: str = "tight",
    objective: str = "ridge",
    init: str | jax.Array | None = None,
    trajectory: bool = False,
) -> Fit:
    """NoisyHead (Algorithm 1): T noisy, projected, full-batch gradient steps from Γ⁰ to Γ^T.

    Guarantee: (ε, δ)-DP for replacing one prompt by any other. The number of prompts is public. The bounds of
    `hyper` are enforced on every prompt (`enforce`) and on Γ, so that the sensitivity of each step
    (`gradient_sensitivity`) holds for every input; `Descent.calibrate` turns it into noise. The paper's own
    form is `**as_printed()`.

    Args:
      key: A JAX key, which must stay secret from everybody who sees Γ.
      features: query (N, D), context (N, D), target (N,); see `featurize`.
      hyper, regularization, step_size, steps, accounting, sensitivity, objective: What the descent does; see
        `Descent`.
      epsilon: ε in (0, 1e8].
      delta: δ in (0, 1).
      init: Γ⁰, independent of the prompts: None or "zero", "sphere" (uniform of norm R), or an array (D, D)
        with ‖Γ⁰‖_F ≤ R.
      trajectory: Whether to return all of Γ¹..Γ^T as gamma (T, D, D); every accounting but "last_iterate"
        covers them.

    Returns:
      Fit(gamma (D, D), guarantee, noise_multiplier). Under `vmap`, for example over keys, return
      `fit(...).gamma`.

    Raises:
      ValueError: for an argument out of range (`Descent` and its `calibrate` list them), shapes that do not
        fit, features that are not finite, an initial Γ outside the ball, or a trajectory under last_iterate
        accounting.
    """
    descent = Descent(
        hyper,
        regularization=regularization,
        step_size=step_size,
        steps=steps,
        accounting=accounting,
        sensitivity=sensitivity,
        objective=objective,
    )
    multiplier, guarantee = descent.calibrate(epsilon, delta)
    if trajectory and accounting == "last_iterate":
        raise ValueError(
            "trajectory=True with accounting='last_iterate': that guarantee covers the last iterate alone; "
            "use accounting='gdp' to release them all"
        )
    if not (init is None or isinstance(init, str)):
        guarantee = guarantee.assuming("the initial Γ does not depend on the prompts")
    gamma = noisy_descent(
        key, features, descent, noise_multiplier=multiplier, init=init, trajectory=trajectory
    )
    return Fit(gamma, guarantee, multiplier)


@in_float64
def noisy_descent(
    key: jax.Array,
    features: Features,
    descent: Descent,
    *,
    noise_multiplier: float | jax.Array,
    init: str | jax.Array | None = None,
    trajectory: bool = False,
) -> jax.Array:
    """The iteration of `fit` at a given noise multiplier, which may be traced, so that `vmap` covers budgets.

    The result has the guarantee for which `descent.calibrate` returns that multiplier. Without noise it is
    projected gradient descent.

    Returns:
      Γ^T (D, D), or Γ¹..Γ^T (T, D, D) with `trajectory`.
    """
    check_key(key)
    features, hyper = check_features(features), descent.hyper
    return _noisy_descent(
        key,
        features,
        hyper,
        _initial(init, key, features.query.shape[1], hyper.parameter_radius),
        decay=descent.decay,
        step_size=descent.step_size,
        noise_multiplier=noise_multiplier,
        sensitivity=descent.change,
        steps=descent.steps,
        trajectory=bool(trajectory),
    )


@in_float64
def gradient_descent(
    features: Features,
    *,
    regularization: float,
    step_size: float,
    steps: int,
    objective: str = "ridge",
    trajectory: bool = False,
) -> jax.Array:
    """Gradient descent from zero on the features as given: no clipping, no projection, **no privacy**.

    Args and errors: as `fit`, but the step size only has to be positive, since no public bound on the
    curvature is known.

    Returns:
      Γ^T (D, D), or Γ¹..Γ^T (T, D, D) with `trajectory`.
    """
    features = check_features(features)
    check_choice(objective, "objective", tuple(DECAY))
    check_positive(regularization, "regularization")
    check_positive(step_size, "step_size")
    return _gradient_descent(
        features,
        _initial(None, None, features.query.shape[1], np.inf),
        decay=DECAY[objective] * regularization,
        step_size=step_size,
        steps=check_integer(steps, "steps"),
        trajectory=bool(trajectory),
    )


@functools.partial(jax.jit, static_argnames=("steps", "trajectory"))
def _noisy_descent(
    key,
    features,
    hyper,
    start,
    *,
    decay,
    step_size,
    noise_multiplier,
    sensitivity,
    steps,
    trajectory,
):
    features = enforce(features, hyper)
    optimizer = optax.chain(
        privatize(
            l2_clip_norm=sensitivity,
            noise_multiplier=noise_multiplier,
            expected_batch_size=features.query.shape[0],
            key=jax.random.fold_in(key, 0),
        ),
        optax.add_decayed_weights(decay),
        optax.sgd(step_size),
        _project_onto_ball(hyper.parameter_radius),
    )
    start = projections.projection_l2_ball(start, hyper.parameter_radius)
    return _iterate(features, optimizer, start, steps, trajectory)


@functools.partial(jax.jit, static_argnames=("steps", "trajectory"))
def _gradient_descent(features, start, *, decay, step_size, steps, trajectory):
    optimizer = optax.chain(
        optax.scale(1 / features.query.shape[0]),
        optax.add_decayed_weights(decay),
        optax.sgd(step_size),
    )
    return _iterate(features, optimizer, start, steps, trajectory)


def _iterate(features, optimizer, start, steps, trajectory):
    gradient = gradient_sum(features)

    def step(carry: Any, _: Any) -> Any:
        gamma, state = carry
        total = gradient(gamma.reshape(start.shape)).reshape(-1)
        updates, state = optimizer.update(total, state, gamma)
        gamma = optax.apply_updates(gamma, updates)
        return (gamma, state), gamma if trajectory else None

    flat = start.reshape(-1)  # XLA compiles and runs noise of one dimension faster
    (gamma, _), iterates = jax.lax.scan(step, (flat, optimizer.init(flat)), length=steps)
    return jnp.reshape(iterates, (-1, *start.shape)) if trajectory else gamma.reshape(start.shape)


def _project_onto_ball(radius) -> optax.GradientTransformation:
    """A transformation that changes an update such that the result is projected onto the l2 ball."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        moved = optax.apply_updates(params, updates)
        nearest = projections.projection_l2_ball(moved, radius)
        return jax.tree.map(jnp.subtract, nearest, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _initial(init, key, dim, radius):
    if init is None or (isinstance(init, str) and init == "zero"):
        return jnp.zeros((dim, dim), jnp.float64)
    if isinstance(init, str):
        check_choice(init, "init", ("zero", "sphere"))
        direction = jax.random.normal(jax.random.fold_in(key, 1), (dim, dim), jnp.float64)
        return radius * direction / jnp.linalg.norm(direction)
    if jnp.shape(init) != (dim, dim):
        raise ValueError(f"init has shape {jnp.shape(init)}: it must be ({dim}, {dim})")
    check_finite(init, "init", "start from a finite Γ")
    if not isinstance(init, Tracer) and np.linalg.norm(init) > radius * (1 + 1e-12):
        raise ValueError(
            f"init has norm {np.linalg.norm(init):.6g}, outside the ball of parameter_radius={radius}"
        )
    return as_float64(init)
