"""Guarantees as values, the ledger that composes them, and the accounting behind both."""

from dpx.privacy.calibration import calibrate_dpsgd
from dpx.privacy.dpsgd import (
    dpsgd_epsilon,
    dpsgd_event,
    dpsgd_guarantee,
    truncation_probability,
)
from dpx.privacy.gaussian import (
    gaussian_budget,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from dpx.privacy.ledger import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    Ledger,
    PrivacyGuarantee,
    gaussian_guarantee,
)
from dpx.privacy.risk import Risk
from dpx.privacy.selection import Price, Trials, selected_guarantee, selected_rdp

__all__ = [
    "ADD_OR_REMOVE_ONE",
    "REPLACE_ONE",
    "Ledger",
    "Price",
    "PrivacyGuarantee",
    "Risk",
    "Trials",
    "calibrate_dpsgd",
    "dpsgd_epsilon",
    "dpsgd_event",
    "dpsgd_guarantee",
    "gaussian_budget",
    "gaussian_epsilon",
    "gaussian_guarantee",
    "gaussian_noise_multiplier",
    "selected_guarantee",
    "selected_rdp",
    "truncation_probability",
]
