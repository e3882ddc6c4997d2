"""dpx: differentially private attention in JAX. The public names."""

from dpx import (
    attention,
    audit,
    cross_attention,
    gram,
    noise,
    noisy_head,
    polynomial,
    privacy,
    reattention,
    sampling,
    trees,
)
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
from dpx.sampling import poisson_batches

__all__ = [
    "ClippedGrads",
    "Ledger",
    "PrivacyGuarantee",
    "attention",
    "audit",
    "calibrate_dpsgd",
    "clipped_grad",
    "cross_attention",
    "dpsgd_epsilon",
    "explain_clipping",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "gram",
    "noise",
    "noisy_head",
    "poisson_batches",
    "polynomial",
    "privacy",
    "privatize",
    "reattention",
    "sampling",
    "trees",
]
