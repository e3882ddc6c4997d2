"""Guarantees that experiments state, in one line."""

from typing import Any

from dpx.privacy import ADD_OR_REMOVE_ONE, PrivacyGuarantee, gaussian_guarantee


def gaussian(
    epsilon: float,
    delta: float,
    mechanism: str,
    unit: str,
    *,
    neighboring: Any = ADD_OR_REMOVE_ONE,
    assumptions: tuple[str, ...] = (),
) -> PrivacyGuarantee:
    """Of one Gaussian release for that budget, by default about units that come or go."""
    about: dict[str, Any] = {"neighboring": neighboring, "assumptions": assumptions}
    return gaussian_guarantee(epsilon, delta, unit=unit, mechanism=mechanism, **about)
