"""The mechanism of additive noise on a Gram matrix, and what it shares with that of `dpx.gram.wishart`.

A mechanism is planned from public numbers alone, and then draws. In formulas X is n×d, α is `column_bound`, β
is `max_column_change` and F is the Frobenius sensitivity of XXᵀ.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
from dp_accounting import DpEvent, NeighboringRelation

from dpx import noise
from dpx.gram.accounting import Columns
from dpx.privacy import gaussian_noise_multiplier

MECHANISMS = ("gaussian", "sampling")


class Planned(NamedTuple):
    """A mechanism that is ready to draw.

    `draw` maps a key and the Gram matrix of projected columns (for sampling, of integers) to the release. The
    other fields are those of `GramRelease` and of its guarantee; `described` is the mechanism in words.
    """

    draw: Callable[[Any, Any], jax.Array]
    described: str
    event: DpEvent | None
    num_samples: int | None
    noise_std: float | None


def check_options(
    mechanism, eta, calibration, assume_good: bool, secure: bool, columns: Columns
) -> None:
    """Raises ValueError for options that the mechanism does not have."""
    if mechanism == "sampling":
        if secure:
            raise ValueError(
                "secure=True is for mechanism='gaussian': sampling has no exact arithmetic"
            )
        if eta is None:
            raise ValueError(
                f"eta=None: mechanism='sampling' needs an eta above the sensitivity, "
                f"{columns.sensitivity:.6g}"
            )
    elif eta is not None or assume_good:
        raise ValueError(f"eta={eta}, assume_good={assume_good} are for mechanism='sampling': omit")
    elif calibration != "exact":
        raise ValueError(
            f"calibration={calibration!r} is not for mechanism='gaussian', whose calibration is exact"
        )


def gaussian(epsilon: float, delta: float, n: int, columns: Columns) -> Planned:
    """XXᵀ + symmetric Gaussian noise of standard deviation F·m on the diagonal; see `dpx.gram.release`.

    F is the sensitivity for columns that were rounded to integers. Under a JAX transformation sums are of
    floats and get the same noise, so that the guarantee of a release does not depend on it.
    """
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    grid = columns.worth
    change = columns.rounded(n).sensitivity
    std = change * grid * multiplier
    draw = partial(_perturb, sensitivity=change, multiplier=multiplier, grid=grid)
    return Planned(
        draw,
        described=f"XXᵀ + symmetric Gaussian noise, standard deviation {std:.6g} on the diagonal",
        event=dp_accounting.GaussianDpEvent(multiplier),
        num_samples=None,
        noise_std=std,
    )


def _perturb(key, gram, *, sensitivity: float, multiplier: float, grid: float):
    about = {"noise_multiplier": multiplier, "label": "Gram matrix"}
    if jnp.issubdtype(gram.dtype, jnp.integer):
        noisy = noise.release_integers(key, gram, sensitivity=sensitivity, unit=grid, **about)
    else:
        noisy = noise.release(key, gram, sensitivity=sensitivity * grid, **about)
    # XXᵀ is symmetric: projecting onto symmetric matrices keeps it and removes half of the noise.
    noisy = jnp.asarray(noisy)
    return (noisy + noisy.T) / 2


def rounded_sensitivity(
    n: int,
    column_bound: float,
    max_column_change: float | None,
    neighboring: NeighboringRelation | str,
) -> float:
    """The sensitivity F for columns of n rounded entries; the noise has standard deviation F·m."""
    columns = Columns(column_bound, max_column_change, neighboring)
    return columns.rounded(n).sensitivity * columns.worth
