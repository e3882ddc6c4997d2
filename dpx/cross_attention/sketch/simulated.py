"""Simulated errors of private memories under two models of keys and values, from public numbers alone.

The real keys and values are private, so that two models with a public seed stand for them:

- Uniform: keys and queries are independent and uniform, in the box [0, R]^d or on the sphere ‖k‖₂ = R. Values
  are smooth functions of keys: the coordinates of the centred key, repeated if d_v > d and scaled to the
  domain. Labels are the nearest of d_v random directions.
- Clusters: keys and queries lie around centres, from which each coordinate deviates by `SPREADS` times the
  deviation of all keys, and have the value of their centre. Centres are uniform. There is one centre for each
  label, and 20 for other values.

The first model measures the error of an answer. The second measures whether an answer tells the query's own
value from those of other clusters, which matters for ranking and classifying. Both are simulations and not
bounds: they compute the sums of attention with the features' weights, draw the noise of a release, and clip
to public ranges. Uniform keys are a hard case, since attention is then close to the mean of all values.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx._numerics import into_simplex
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import (
    Features,
    PolynomialFeatures,
    RandomFeatures,
    truncated_exponential,
)
from dpx.cross_attention.sketch.contribution import largest_contribution
from dpx.cross_attention.sketch.sums import whole_change, whole_unit

SPREADS = (1.0, 2.0)  # the deviations within a cluster, over the deviation of all keys
_ROWS, _ROWS_OF_CLUSTERS, _QUERIES, _CENTRES = 2048, 1024, 128, 20
_DRAWS = 8  # draws of noise when answers are compared


class Simulation(NamedTuple):
    """The public numbers of a release of r features; without a Taylor degree they are random."""

    domain: Domain
    n: int
    noise_multiplier: float
    degree: int | None = None
    num_features: int = 1
    contribution_bound: float | None = None


class _Memory(NamedTuple):
    """Keys (n, d), values (n, d_v) and queries (m, d) of a model.

    `kinds` are the distinct values (c, d_v), and `own` is the index among them of each query's value; both
    are empty if every key has a value of its own.
    """

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray
    kinds: np.ndarray
    own: np.ndarray


@functools.lru_cache(maxsize=8)
def _uniform(domain: Domain, n: int) -> _Memory:
    rng = np.random.default_rng(0)
    keys, queries = (_places(rng, domain, count) for count in (n, _QUERIES))
    values = _values(rng, domain, keys)
    empty = np.zeros((0, domain.value_dim)), np.zeros(0, int)
    return _Memory(_as_keys(domain, keys), values, _as_queries(domain, queries), *empty)


@functools.lru_cache(maxsize=8)
def _clusters(domain: Domain, n: int, spread: float) -> _Memory:
    rng = np.random.default_rng(3)
    labels = domain.value_domain == "simplex"
    centres = _places(rng, domain, domain.value_dim if labels else _CENTRES)
    kinds = np.eye(len(centres)) * domain.value_bound if labels else _values(rng, domain, centres)
    of_keys, own = (rng.integers(len(centres), size=count) for count in (n, _QUERIES))
    keys, queries = (
        _onto(domain, centres[which] + spread * rng.normal(size=(len(which), domain.dim)))
        for which in (of_keys, own)
    )
    return _Memory(_as_keys(domain, keys), kinds[of_keys], _as_queries(domain, queries), kinds, own)


def _places(rng, domain: Domain, count: int) -> np.ndarray:
    """Uniform points (count, d) about the keys' centre, scaled so that coordinates have variance near 1."""
    if domain.kind == "box":
        return math.sqrt(3) * (2 * rng.random((count, domain.dim)) - 1)
    return math.sqrt(domain.dim) * _directions(rng, (count, domain.dim))


def _onto(domain: Domain, x: np.ndarray) -> np.ndarray:
    """The points of the domain that are nearest to x, in the units of `_places`."""
    if domain.kind == "box":
        return np.clip(x, -math.sqrt(3), math.sqrt(3))
    return x * (math.sqrt(domain.dim) / np.linalg.norm(x, axis=1, keepdims=True))


def _as_keys(domain: Domain, x: np.ndarray) -> np.ndarray:
    """Points of `_places` as keys minus their centre."""
    half = math.sqrt(12) if domain.kind == "box" else math.sqrt(domain.dim)
    return x * (domain.key_bound / half)


def _as_queries(domain: Domain, x: np.ndarray) -> np.ndarray:
    if domain.kind == "box":
        return domain.query_bound * (0.5 + x / math.sqrt(12))
    return x * (domain.query_bound / math.sqrt(domain.dim))


def _values(rng, domain: Domain, x: np.ndarray) -> np.ndarray:
    """Values (n, d_v) that depend on the points x of `_places`."""
    if domain.value_domain == "simplex":
        labels = (x @ _directions(rng, (domain.value_dim, domain.dim)).T).argmax(1)
        return np.eye(domain.value_dim)[labels] * domain.value_bound
    values = x[:, np.arange(domain.value_dim) % domain.dim]
    if domain.kind == "box":
        values = values / math.sqrt(3)
    if domain.value_domain == "ball":
        values = values / np.linalg.norm(values, axis=1, keepdims=True)
    return np.clip(values, -1, 1) * domain.value_bound


def _directions(rng, shape) -> np.ndarray:
    drawn = rng.normal(size=shape)
    return drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)


@functools.lru_cache(maxsize=256)
def errors(release: Simulation) -> tuple[float, float]:
    """The mean |answer − exact attention| of an entry for uniform keys, with noise and without."""
    memory = _uniform(release.domain, min(release.n, _ROWS))
    logits = memory.queries @ memory.keys.T / release.domain.scale
    weights = np.exp(logits - logits.max(1, keepdims=True))
    exact = weights @ memory.values / weights.sum(1, keepdims=True)
    error, bias = (float(np.abs(part - exact).mean()) for part in _simulated(release, memory))
    return error, bias


@functools.lru_cache(maxsize=256)
def told_apart(release: Simulation) -> float:
    """The probability that an answer tells its query's own value from another: 0.5 by chance, at most 1.

    Keys lie in clusters. It is the probability of ⟨answer, v⟩ > ⟨answer, v'⟩, where v is the query's own
    value and v' that of another cluster. Values of one column have no direction; for them it is the
    probability that the answers to two queries are in the order of their values. A tie counts half, and the
    result is the mean over `SPREADS`.
    """
    rates = []
    for spread in SPREADS:
        memory = _clusters(release.domain, min(release.n, _ROWS_OF_CLUSTERS), spread)
        answers, _ = _simulated(release, memory, draws=_DRAWS)
        which = np.tile(memory.own, _DRAWS)
        own = memory.kinds[which]
        if release.domain.value_dim == 1:
            ahead, other = answers - answers.T, own != own.T
            ahead = ahead * np.sign(own - own.T)
        else:
            likeness = answers @ memory.kinds.T
            ahead = (answers * own).sum(1, keepdims=True) - likeness
            other = np.arange(len(memory.kinds)) != which[:, None]
        rates.append(0.5 + np.sign(ahead[other]).mean() / 2 if other.any() else 0.5)
    return float(np.mean(rates))


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def _simulated(release: Simulation, memory: _Memory, draws: int = 1) -> list[np.ndarray]:
    """Answers (draws·m, d_v) with noise and without it; all queries are answered with each draw in turn.

    It runs in NumPy, because compiling it for every size and scale would take longer than the release.
    """
    domain, degree, keys, rows = release.domain, release.degree, memory.keys, len(memory.keys)
    weighed = np.concatenate([np.full((rows, 1), domain.mass_weight), memory.values], axis=1)
    stretch = math.sqrt(domain.query_radius / domain.key_radius)
    if degree is None:
        directions: Any = _blocks(release.num_features, domain.dim)
        features: Features = RandomFeatures(directions, domain.scale)
        largest = largest_contribution(domain, features, release.contribution_bound)
        phi = _positive(features, stretch * keys)
        sizes = np.linalg.norm(phi, axis=1) * np.linalg.norm(weighed, axis=1)
        phi[~np.isfinite(sizes)] = 0
        weighed = weighed * np.minimum(1, largest / sizes)[:, None]
        read = _positive(features, memory.queries / stretch)
        sums = (read @ (phi.T @ weighed) / rows)[:, None]
        norms = np.linalg.norm(read, axis=1)[:, None]
    else:
        features = PolynomialFeatures(domain.dim, degree, domain.scale)
        largest = largest_contribution(domain, features, None)
        logits = memory.queries @ keys.T / domain.scale
        # The constant feature is kept apart, since its noise is common to all answers.
        one, others = np.ones_like(logits), truncated_exponential(logits, degree)
        sums = np.stack([one @ weighed, (others - one) @ weighed], axis=1) / rows
        squares = np.square(memory.queries / stretch).sum(1) / domain.scale
        squares = truncated_exponential(squares, degree)
        norms = np.sqrt(np.stack([one[:, 0], squares - one[:, 0]], axis=1))
    change = whole_change(features, domain, 1) * whole_unit(largest) / release.n
    std = release.noise_multiplier * change
    sums, norms = (np.tile(part, (draws, *[1] * (part.ndim - 1))) for part in (sums, norms))
    queries = np.tile(memory.queries, (draws, 1))
    noise = std * norms[..., None] * np.random.default_rng(1).normal(size=sums.shape)
    known = domain.public_count and degree is not None
    return [_answers(domain, queries, part, known) for part in (sums + noise, sums)]


def _answers(domain: Domain, queries, sums, known_count: bool) -> np.ndarray:
    """Answers from sums (m, 1 or 2, 1 + d_v); if there are 2, the first is that of the constant feature."""
    mass = sums[..., 1:].sum(-1) / domain.value_bound
    if domain.mass_weight:
        mass = sums[..., 0] / domain.mass_weight
    if known_count:
        mass = np.concatenate([np.ones_like(mass[:, :1]), mass[:, 1:]], axis=1)
    with jax.ensure_compile_time_eval():  # a memory may be built under jit
        bound = np.asarray(domain.logit_bounds(jnp.asarray(queries)))
    answers = sums[..., 1:].sum(1) / np.clip(mass.sum(1), np.exp(-bound), np.exp(bound))[:, None]
    limit = domain.value_bound
    if domain.value_domain == "simplex":
        return into_simplex(answers, limit, np)
    if domain.value_domain == "ball":
        lengths = np.linalg.norm(answers, axis=1, keepdims=True)
        return answers * limit / np.maximum(lengths, limit)
    return np.clip(answers, -limit, limit)


@functools.lru_cache(maxsize=8)
def _blocks(num_features: int, dim: int) -> np.ndarray:
    """Directions (r, d) with the law of those of `RandomFeatures.draw`, for simulations."""
    rng = np.random.default_rng(2)
    rotations, _ = np.linalg.qr(rng.normal(size=(-(-num_features // dim), dim, dim)))
    lengths = np.linalg.norm(rng.normal(size=(num_features, dim)), axis=1, keepdims=True)
    return rotations.reshape(-1, dim)[:num_features] * lengths


def _positive(features: RandomFeatures, x: np.ndarray) -> np.ndarray:
    """The positive random features (n, r) of x (n, d)."""
    x = x / math.sqrt(features.scale or features.dim)
    exponents = x @ features.directions.T - np.square(x).sum(1, keepdims=True) / 2
    return np.exp(exponents) / math.sqrt(features.num_features)
