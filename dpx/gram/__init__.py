"""The differentially private release of the Gram matrix XXᵀ, and symmetric attention computed from it."""

from dpx.gram.accounting import frobenius_sensitivity, sampling_epsilon
from dpx.gram.attend import attention
from dpx.gram.mechanisms import rounded_sensitivity
from dpx.gram.releases import (
    GramRelease,
    as_printed,
    planned_guarantee,
    project_psd,
    release,
    statistic,
)
from dpx.gram.utility import (
    UtilityBounds,
    gaussian_entry_error,
    sampling_entry_error,
    utility_bounds,
)
from dpx.gram.wishart import max_samples, wishart_mean

__all__ = [
    "GramRelease",
    "UtilityBounds",
    "as_printed",
    "attention",
    "frobenius_sensitivity",
    "gaussian_entry_error",
    "max_samples",
    "planned_guarantee",
    "project_psd",
    "release",
    "rounded_sensitivity",
    "sampling_entry_error",
    "sampling_epsilon",
    "statistic",
    "utility_bounds",
    "wishart_mean",
]
