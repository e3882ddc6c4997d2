"""What the simulated NoisyHead experiments share: sizes of a cell, fits of the table, and their checks."""

import math
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpx import noisy_head
from dpx.privacy import PrivacyGuarantee
from experiments import checks

# "paper" is Algorithm 1 as printed, with (4.1). "repaired" has the same step size and number of steps, with
# exact accounting, tight sensitivity, the ridge objective and valid bounds. "last_iterate" also takes the
# step of fastest contraction, 2/(2λ + G²), and the accounting that covers Γ^T alone.
METHODS = ("paper", "repaired", "last_iterate")
OPTIONS = {
    "paper": noisy_head.as_printed(),
    "repaired": {"accounting": "gdp"},
    "last_iterate": {"accounting": "last_iterate"},
}
TITLES = {
    "paper": "NoisyHead as printed",
    "repaired": "NoisyHead repaired",
    "last_iterate": "NoisyHead, last iterate",
    "noisy_head": "NoisyHead, last iterate",
    "one_shot": "moments released once",
    "zero": "predict zero",
    "ridge": "ridge, not private",
    "best_ridge": "ridge at its best λ, not private",
    "ridge_qr": "ridge by QR, not private",
    "ridge_gram": "ridge by normal equations, not private",
    "paper_without_noise": "as printed, without noise",
    "repaired_without_noise": "repaired, without noise",
    "last_iterate_without_noise": "last iterate, without noise",
    "not_private": "descent, not private",
    "claimed": "Theorem 4.2",
}
SIMULATED = "the prompts are simulated: the guarantee is what the method would give"


class Cell(NamedTuple):
    """One data distribution: N prompts of L tokens in D dimensions, and the λ that goes with them."""

    num_prompts: int
    length: int
    dim: int
    regularization: float
    noise_std: float

    def draw(self, key: jax.Array, **options) -> noisy_head.Features:
        """Features of prompts."""
        sizes = (self.num_prompts, self.length, self.dim)
        return noisy_head.sample_features(key, *sizes, noise_std=self.noise_std, **options)

    def risks(self, gamma: jax.Array, reference: jax.Array) -> jax.Array:
        """(..., 2): excess risk over a reference, and test MSE, both exact."""
        excess, mse = (
            noisy_head.population_risk(gamma, self.length, noise_std=self.noise_std, **against)
            for against in ({"reference": reference}, {})
        )
        return jnp.stack([excess, mse], axis=-1)


def make_cell(
    config, *, num_prompts: int, length: int | None = None, dim: int | None = None
) -> Cell:
    """A cell; sizes that are not set follow the paper: L = D = ⌊√N⌋ and λ = N/D."""
    length = length or config.length or math.isqrt(num_prompts)
    dim = dim or config.dim or math.isqrt(num_prompts)
    regularization = config.regularization or num_prompts / dim
    return Cell(num_prompts, length, dim, regularization, config.noise_std)


def make_descent(name: str, config, cell: Cell, *, steps: int | None = None) -> noisy_head.Descent:
    """The fit called `name`, one of `METHODS`, in a cell.

    The number of steps is `steps`, or else config.steps, or else log N^steps_exponent / −log(1 − λη).
    """
    printed = name == "paper"
    hyper = noisy_head.hyperparameters(
        cell.num_prompts,
        cell.length,
        cell.dim,
        regularization=cell.regularization,
        noise_std=cell.noise_std,
        kappa=config.kappa,
        rule="paper" if printed else "valid",
        objective="paper" if printed else "ridge",
    )
    decay = (2 if printed else 1) * cell.regularization
    curvature = hyper.feature_radius**2
    step_size = 2 / (2 * decay + curvature)
    if config.step_scale and name != "last_iterate":
        step_size = config.step_scale * cell.regularization / (cell.regularization + curvature) ** 2
    rate = decay * step_size if name == "last_iterate" else cell.regularization * step_size
    if steps is None:
        steps = config.steps or math.ceil(
            config.steps_exponent * math.log(cell.num_prompts) / -math.log1p(-rate)
        )
    return noisy_head.Descent(
        hyper,
        regularization=cell.regularization,
        step_size=step_size,
        steps=steps,
        **OPTIONS[name],
    )


def guarantees(config, cell: Cell) -> dict[str, PrivacyGuarantee]:
    """What each fit of config.methods guarantees in a cell, by name."""
    return {
        name: make_descent(name, config, cell).calibrate(config.epsilon, config.delta)[1]
        for name in config.methods
    }


def check(config) -> None:
    """Raises ValueError for a bad value of what all simulations share."""
    checks.integers(config, "trials", "num_prompts", "length", "dim", "steps")
    checks.positive(config, "regularization", "step_scale", "steps_exponent", "kappa")
    checks.positive(config, "noise_std", zero=True)
    checks.choice(config, "methods", METHODS)


def check_some(config, *names: str) -> None:
    """Raises ValueError for a list of the config that is empty."""
    for name in names:
        if not config[name]:
            raise ValueError(f"config.{name}=() leaves nothing to run: name at least one")


def progress(words: str) -> None:
    """Says on stderr how far a run is."""
    print(words, file=sys.stderr, flush=True)
