"""dpx: differentially private attention in JAX. The public names."""

from importlib import metadata as _metadata

from dpx import (
    attention,
    audit,
    cross_attention,
    data,
    distributed,
    gram,
    ngram,
    nn,
    noise,
    noisy_head,
    partial,
    privacy,
    reattention,
    recommend,
    training,
)
from dpx._saving import load, save
from dpx.clipping import ClippedGrads, clipped_grad, explain_clipping
from dpx.privacy import (
    Ledger,
    PrivacyGuarantee,
    calibrate_dpsgd,
    dpsgd_epsilon,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from dpx.training import poisson_batches, privatize, secret_key

try:
    __version__ = _metadata.version("dpx-attention")
except _metadata.PackageNotFoundError:  # a clone that is on the path, but not installed
    __version__ = "0+unknown"

__all__ = [
    "ClippedGrads",
    "Ledger",
    "PrivacyGuarantee",
    "attention",
    "audit",
    "calibrate_dpsgd",
    "clipped_grad",
    "cross_attention",
    "data",
    "distributed",
    "dpsgd_epsilon",
    "explain_clipping",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "gram",
    "load",
    "ngram",
    "nn",
    "noise",
    "noisy_head",
    "partial",
    "poisson_batches",
    "privacy",
    "privatize",
    "reattention",
    "recommend",
    "save",
    "secret_key",
    "training",
]
