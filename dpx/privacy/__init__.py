"""Privacy as a value: guarantees, the ledger that composes them, and exact accounting."""

from dpx.privacy.dpsgd import calibrate_dpsgd, dpsgd_epsilon, dpsgd_event, dpsgd_guarantee
from dpx.privacy.gaussian import (
    check_delta,
    check_epsilon,
    check_integer,
    check_number,
    check_positive,
    gaussian_budget,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from dpx.privacy.ledger import ADD_OR_REMOVE_ONE, REPLACE_ONE, Ledger, PrivacyGuarantee

__all__ = [
    "ADD_OR_REMOVE_ONE",
    "REPLACE_ONE",
    "Ledger",
    "PrivacyGuarantee",
    "calibrate_dpsgd",
    "check_delta",
    "check_epsilon",
    "check_integer",
    "check_number",
    "check_positive",
    "dpsgd_epsilon",
    "dpsgd_event",
    "dpsgd_guarantee",
    "gaussian_budget",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
]
