"""The expected error of a private memory before anything is spent, and the choice of the best features.

All of this follows from public numbers: shapes, bounds and the budget. `simulated` describes the model of
keys and values, and simulates the error of answers under it.
"""

import dataclasses
import math
import sys
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from dpx._validate import check_integer
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import Features, PolynomialFeatures, truncated_exponential
from dpx.cross_attention.sketch.choice import FEATURE_OPTIONS, choose_features
from dpx.cross_attention.sketch.simulated import Simulation, errors, told_apart
from dpx.cross_attention.sketch.sums import needed_bytes
from dpx.privacy import gaussian_noise_multiplier

_LARGEST_LOGITS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # one for each scale that is tried
_NUM_FEATURES = (256, 1024)  # the numbers of random features that are tried
_MAX_BYTES = 4 * 2**30
_LARGE_BYTES = 2**30
_CHOSEN_BYTES = 2**28  # the most memory of features that are chosen, so that building takes seconds
_CHANCE = 0.55  # a smaller `told_apart` may be due to the noise of the simulation
_NEARLY = 0.9  # the share of the best `told_apart` beyond one half, or of the mean's error, that is enough
_EQUAL_LOGIT = 0.1  # with smaller logits, weights differ by less than a factor of 1.25


class MemoryWarning(UserWarning):
    """A warning that a private memory is less accurate than the private mean of V, or takes gigabytes."""


class ExpectedError(NamedTuple):
    """The expected error of a release under the models of `dpx.cross_attention.sketch.simulated`.

    Attributes:
      error: The mean |answer − exact attention| of an entry.
      bias: The same without noise, which is the error of the features.
      mean_error: The same for the private mean of V, released with the same budget.
      told_apart: The probability that an answer is more like its query's own value than like another one, for
        keys in clusters: 0.5 by chance, at most 1. It matters for ranking and classifying, which tolerate
        answers of the wrong size.
      features: "taylor" or "random".
      degree: The degree of Taylor features, otherwise None.
      num_features: r.
      scale: The number that logits are divided by.
      num_bytes: The memory that building takes, beside the rows.
    """

    error: float
    bias: float
    mean_error: float
    told_apart: float
    features: str
    degree: int | None
    num_features: int
    scale: float
    num_bytes: int


def expected_error(
    n: int,
    dim: int,
    value_dim: int,
    *,
    epsilon: float,
    delta: float,
    num_heads: int = 1,
    contribution_bound: float | None = None,
    **options,
) -> ExpectedError:
    """The expected error of `build` for K (n, dim) and V (n, value_dim), from public numbers alone.

        cross_attention.expected_error(11_000, 64, 20, key_bound=1.0, value_bound=1.0, domain="ball",
                                       value_domain="simplex", epsilon=1.0, delta=1e-5, features="auto")

    Args:
      n: The number of rows, or a public guess of it if it is private.
      dim, value_dim: d and d_v.
      epsilon, delta: The budget, as in `build`.
      num_heads: The number of heads that share the budget.
      contribution_bound: The bound for random features, as in `build`.
      **options: As in `build`: key_bound, value_bound, query_bound, domain, scale, value_domain and
        neighboring; features, degree, relative_error and num_features.

    Raises:
      ValueError: as `build`.
    """
    n, dim, value_dim = (
        check_integer(size, name)
        for name, size in (("n", n), ("dim", dim), ("value_dim", value_dim))
    )
    chosen = {name: options.pop(name) for name in FEATURE_OPTIONS if name in options}
    declared = Domain.of_widths(dim, value_dim, **options)
    multiplier = math.sqrt(num_heads) * gaussian_noise_multiplier(epsilon, delta)
    if chosen.get("features") == "auto":
        any_scale = options.get("scale") is None
        return choose(declared, n, multiplier, any_scale=any_scale)[2]
    features = choose_features(declared, **chosen)
    return simulated(declared, features, n, multiplier, contribution_bound)


def choose(
    domain: Domain, n: int, multiplier: float, *, any_scale: bool
) -> tuple[Domain, Features, ExpectedError]:
    """The best features, the domain with their scale, and their expected error.

    Candidates are Taylor features of even degree and random features, as far as they fit into memory, and the
    mean of V, which is degree 0. First, candidates are kept that tell values apart nearly as well as the best
    (`ExpectedError.told_apart`). If the best is not clearly better than chance, the mean is kept instead, and
    candidates whose error is clearly smaller than that of the private mean. Of those kept, the smallest scale
    is chosen at which the expected error is at most half of the private mean's, so that attention is as sharp
    as the noise allows. If there is none, the candidate is chosen whose error is the smallest share of the
    mean's.

    Args:
      domain: The declared bounds.
      n: The number of rows, or a public guess of it.
      multiplier: The noise multiplier of a head.
      any_scale: Whether the scale is chosen too.
    """
    radii = domain.key_radius * domain.query_radius
    scales = [radii / logit for logit in _LARGEST_LOGITS] if any_scale else [domain.scale]
    options = [
        _estimated(release)
        for scale in scales
        for release in _candidates(
            Simulation(dataclasses.replace(domain, scale=scale), n, multiplier)
        )
    ]
    best = max(about.told_apart for about in options)
    if best >= _CHANCE:
        least = 0.5 + _NEARLY * (best - 0.5)
        options = [about for about in options if about.told_apart >= least]
    else:
        options = [about for about in options if about.degree == 0 or _share(about) < _NEARLY]

    def preferred(about):
        share = _share(about)
        return (about.scale, share) if share <= 0.5 and any_scale else (math.inf, share)

    about = min(options, key=preferred)
    domain = dataclasses.replace(domain, scale=about.scale)
    number = {"degree": about.degree, "num_features": about.num_features}
    return domain, choose_features(domain, about.features, **number), about


def _share(expected: ExpectedError) -> float:
    """The error over that of the private mean, which is zero if there is only one label."""
    return expected.error / max(expected.mean_error, sys.float_info.min)


def simulated(
    domain: Domain,
    features: Features,
    n: int,
    multiplier: float,
    contribution_bound: float | None = None,
) -> ExpectedError:
    """The expected error of a release with these features, at the noise multiplier of a head."""
    degree = features.degree if isinstance(features, PolynomialFeatures) else None
    about = (degree, features.num_features, contribution_bound)
    return _estimated(Simulation(domain, n, multiplier, *about))


def _estimated(release: Simulation) -> ExpectedError:
    error, bias = errors(release)
    mean_error, _ = errors(release._replace(degree=0, num_features=1, contribution_bound=None))
    return ExpectedError(
        error=error,
        bias=bias,
        mean_error=mean_error,
        told_apart=told_apart(release),
        features="random" if release.degree is None else "taylor",
        degree=release.degree,
        num_features=release.num_features,
        scale=release.domain.scale,
        num_bytes=needed_bytes(release.num_features, release.domain),
    )


def check_size(features: Features, domain: Domain, heads: int = 1) -> str:
    """The memory that building takes, in words; raises ValueError if it is more than 4 GiB."""
    size = needed_bytes(features.num_features, domain, heads)
    space = f"{size / 2**30:.2g} GiB" if size >= 2**30 else f"{size / 2**20:.2g} MiB"
    takes = f"{features.num_features} features of {1 + domain.value_dim} sums take {space}"
    if size > _MAX_BYTES:
        raise ValueError(
            f"{takes}, more than {_MAX_BYTES / 2**30:.2g} GiB: use a lower degree, features='auto' or "
            "'random', smaller bounds or a larger scale"
        )
    return takes


def warn_before(
    domain: Domain,
    features: Features,
    n: int | None,
    multiplier: float,
    heads: int,
    contribution_bound: float | None,
) -> None:
    """Warns of a release that is a constant, less accurate than the private mean, or large.

    Args:
      domain, features, heads, contribution_bound: Those of the release.
      n: The number of rows; None if it is private, since no expected error may then depend on it.
      multiplier: The noise multiplier of a head.

    Raises:
      ValueError: for more memory than 4 GiB.
    """
    takes = check_size(features, domain, heads)
    if needed_bytes(features.num_features, domain, heads) > _LARGE_BYTES:
        _warn(f"{takes} while they are built")
    constant = getattr(features, "degree", None) == 0
    if domain.largest_logit < _EQUAL_LOGIT and not constant:
        _warn(
            f"scale={domain.scale:.4g} makes nearly all weights equal, between e^±{domain.largest_logit:.2g} "
            "in all of the domain, so that answers hardly leave the mean of V: use scale=√d = "
            f"{math.sqrt(domain.dim):.3g} or less, or features='auto' without a scale"
        )
    if n is None:
        if constant:
            _warn("degree=0 is a constant: every query gets the private mean of V")
        return
    about = simulated(domain, features, n, multiplier, contribution_bound)
    if constant:
        _warn(
            "degree=0 is a constant: every query gets the private mean of V, which errs by "
            f"{about.error:.3g} for an entry of uniform keys; features='auto' takes it where nothing tells "
            f"values apart in more than {_CHANCE:.0%} of cases, here from {n} rows with noise multiplier "
            f"{multiplier:.3g}: use more rows, a larger epsilon, a smaller scale or fewer dimensions"
        )
    elif about.error > 1.1 * about.mean_error:
        _warn(
            f"{takes} and will err by {about.error:.3g} for an entry of uniform keys, of which "
            f"{about.bias:.3g} is bias, where the private mean of V errs by {about.mean_error:.3g}. In a "
            f"memory of clusters answers are more like their query's own value than like another one in "
            f"{about.told_apart:.0%} of cases (by chance in 50 %): read them as ranks and not as values, or "
            "use more rows or a larger epsilon; see dpx.cross_attention.expected_error"
        )


def _warn(message: str) -> None:
    warnings.warn(message, MemoryWarning, stacklevel=4)


def _candidates(release: Simulation) -> Iterator[Simulation]:
    """Yields features that fit into memory; Taylor features end with the first whose bias is negligible."""
    domain = release.domain
    for degree in range(0, 42, 2):
        count = math.comb(degree + domain.dim, domain.dim)
        if needed_bytes(count, domain) > _CHOSEN_BYTES:
            break
        yield release._replace(degree=degree, num_features=count)
        if degree and truncated_exponential(-domain.largest_logit, degree) < 1.01 * math.exp(
            -domain.largest_logit
        ):
            break
    for count in _NUM_FEATURES:
        yield release._replace(num_features=count)
