"""Errors of private memories under models of keys and values, from public numbers alone.

How keys and values lie is unknown without the data, and replaced by two models with a public seed:

- Uniform: keys are independent and uniform, in the box [0, R]^d or on the sphere ‖k‖₂ = R, and so are
  queries. Values follow keys as closely as their domain lets them: they are the coordinates of the centred
  key, from the first again where d_v > d, scaled to the domain. Labels are the nearest of d_v random
  directions.
- Clusters: keys and queries lie around centres, each coordinate off by `SPREADS` times its own deviation,
  and have their centre's value. Centres are uniform; of labels each has one, and other values have 20.

Under the first an answer's error is measured, under the second whether it tells a query's own value from
those of other clusters, which is what ranking and classifying take. Both are simulated, not bounded: the sums
of attention with the features' weights, a draw of the noise that they would have, and the cuts to public
ranges that follow. Uniform keys are hard, since attention hardly stands out from the mean of all values.
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

SPREADS = (1.0, 2.0)  # of a cluster, in every direction, in units of the spread of all keys
_ROWS, _ROWS_OF_CLUSTERS, _QUERIES, _CENTRES = 2048, 1024, 128, 20
_DRAWS = 8  # of noise, where answers are compared


class Simulation(NamedTuple):
    """A release by public numbers, for simulations: its features have a Taylor degree, or else are random."""

    domain: Domain
    n: int
    noise_multiplier: float
    degree: int | None = None
    num_features: int = 0
    contribution_bound: float | None = None


class _Memory(NamedTuple):
    """Keys (n, d) and values (n, d_v) of a model, with queries (m, d) and the values of their own (m, d_v).

    `kinds` are the different values (c, d_v) that there are, and `own` is the number of each query's; both
    are empty where every key has a value of its own.
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
    """Uniform points (count, d) about the centre of the keys, whose coordinates have a variance near 1."""
    if domain.kind == "box":
        return math.sqrt(3) * (2 * rng.random((count, domain.dim)) - 1)
    return math.sqrt(domain.dim) * _directions(rng, (count, domain.dim))


def _onto(domain: Domain, x: np.ndarray) -> np.ndarray:
    """The points of the domain next to any ones, in the units of `_places`."""
    if domain.kind == "box":
        return np.clip(x, -math.sqrt(3), math.sqrt(3))
    return x * (math.sqrt(domain.dim) / np.linalg.norm(x, axis=1, keepdims=True))


def _as_keys(domain: Domain, x: np.ndarray) -> np.ndarray:
    """Keys about their centre."""
    half = math.sqrt(12) if domain.kind == "box" else math.sqrt(domain.dim)
    return x * (domain.key_bound / half)


def _as_queries(domain: Domain, x: np.ndarray) -> np.ndarray:
    if domain.kind == "box":
        return domain.query_bound * (0.5 + x / math.sqrt(12))
    return x * (domain.query_bound / math.sqrt(domain.dim))


def _values(rng, domain: Domain, x: np.ndarray) -> np.ndarray:
    """Values (n, d_v) that follow points of `_places`."""
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
    """Mean |error| of an entry with noise and without: from exact attention, of uniform keys."""
    memory = _uniform(release.domain, min(release.n, _ROWS))
    logits = memory.queries @ memory.keys.T / release.domain.scale
    weights = np.exp(logits - logits.max(1, keepdims=True))
    exact = weights @ memory.values / weights.sum(1, keepdims=True)
    error, bias = (float(np.abs(part - exact).mean()) for part in _simulated(release, memory))
    return error, bias


@functools.lru_cache(maxsize=256)
def told_apart(release: Simulation) -> float:
    """How well answers tell a query's own value from others: 0.5 by chance, and at most 1.

    Keys lie in clusters. It is how often ⟨answer, v⟩ > ⟨answer, v'⟩, where v is the query's own value and v'
    that of another cluster: of labels, how often its own has more than another one. Values of one column have
    no direction, and it is how often two queries' answers are in the order of their values. It is the mean
    over `SPREADS`; a tie counts half.
    """
    found = []
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
        found.append(0.5 + np.sign(ahead[other]).mean() / 2 if other.any() else 0.5)
    return float(np.mean(found))


@np.errstate(over="ignore", invalid="ignore")
def _simulated(release: Simulation, memory: _Memory, draws: int = 1) -> list[np.ndarray]:
    """Answers (draws·m, d_v) with noise and without: to all queries with a draw, and to all with another one.

    In NumPy: compiling this for every size and temperature would take longer than the release.
    """
    domain, degree, keys, rows = release.domain, release.degree, memory.keys, len(memory.keys)
    weighed = np.concatenate([np.full((rows, 1), domain.mass_weight), memory.values], axis=1)
    stretch = math.sqrt(domain.query_radius / domain.key_radius)
    if degree is None:
        directions: Any = blocks(release.num_features, domain.dim)
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
        # The constant feature apart, whose noise is the same in all answers.
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
    """Answers from sums (m, 1 or 2, 1 + d_v), of which those of the constant feature come first."""
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
def blocks(num_features: int, dim: int) -> np.ndarray:
    """Directions (r, d) as `RandomFeatures.draw` makes them, for simulations."""
    rng = np.random.default_rng(2)
    rotations, _ = np.linalg.qr(rng.normal(size=(-(-num_features // dim), dim, dim)))
    lengths = np.linalg.norm(rng.normal(size=(num_features, dim)), axis=1, keepdims=True)
    return rotations.reshape(-1, dim)[:num_features] * lengths


def _positive(features: RandomFeatures, x: np.ndarray) -> np.ndarray:
    """Positive random features of x (n, d): (n, r)."""
    x = x / math.sqrt(features.scale or features.dim)
    exponents = x @ features.directions.T - np.square(x).sum(1, keepdims=True) / 2
    return np.exp(exponents) / math.sqrt(features.num_features)
