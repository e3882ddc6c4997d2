"""dpx: differentially private attention in JAX. The public names."""

from dpx import gram, privacy, sampling
from dpx.clipping import ClippedGrads, clipped_grad, explain_clipping
from dpx.optim import privatize
from dpx.privacy import (
    Ledger,
    PrivacyGuarantee,
    calibrate_dpsgd,
    dpsgd_epsilon,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)

__all__ = [
    "ClippedGrads",
    "Ledger",
    "PrivacyGuarantee",
    "calibrate_dpsgd",
    "clipped_grad",
    "dpsgd_epsilon",
    "explain_clipping",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "gram",
    "privacy",
    "privatize",
    "sampling",
]
