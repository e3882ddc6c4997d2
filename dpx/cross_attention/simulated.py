"""Errors of private memories under a model of keys and values, from public numbers alone.

How keys and values lie is unknown without the data, and replaced by a model:

- Keys are independent and uniform, in the box [0, R]^d or on the sphere ‖k‖₂ = R, and so are queries.
- Values follow keys as closely as their domain lets them: they are the coordinates of the centred key, from
  the first again where d_v > d, scaled to the domain. Labels are the nearest of d_v random directions.

Under this model an answer's error is simulated, not bounded: the sums of attention with the features'
weights, a draw of the noise that they would have, and the cuts to public ranges that follow. Real keys lie in
clusters, where attention stands out further from the mean than here: an expected error is that of hard data.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx._numerics import into_simplex
from dpx.cross_attention.contribution import largest_contribution
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import (
    Features,
    PolynomialFeatures,
    RandomFeatures,
    truncated_exponential,
)
from dpx.cross_attention.moments import whole_change, whole_unit

_ROWS, _QUERIES = 2048, 128


@functools.lru_cache(maxsize=8)
def _memory(domain: Domain, n: int) -> tuple[np.ndarray, ...]:
    """Keys (n, d), values and queries of the model with a public seed, their logits and their attention."""
    rng = np.random.default_rng(0)
    shapes = (n, domain.dim), (_QUERIES, domain.dim)
    if domain.kind == "box":
        unit_keys, unit_queries = (rng.random(shape) for shape in shapes)
        centred = 2 * unit_keys - 1
    else:
        unit_keys, unit_queries = (_directions(rng, shape) for shape in shapes)
        centred = unit_keys * math.sqrt(domain.dim)
    if domain.value_domain == "simplex":
        labels = (centred @ _directions(rng, (domain.value_dim, domain.dim)).T).argmax(1)
        values = np.eye(domain.value_dim)[labels]
    else:
        values = centred[:, np.arange(domain.value_dim) % domain.dim]
        if domain.value_domain == "ball":
            values = values / np.linalg.norm(values, axis=1, keepdims=True)
    values = np.clip(values, -1, 1) * domain.value_bound
    keys, queries = unit_keys * domain.key_bound, unit_queries * domain.query_bound
    logits = queries @ (keys - domain.centre).T / domain.scale
    weights = np.exp(logits - logits.max(1, keepdims=True))
    exact = weights @ values / weights.sum(1, keepdims=True)
    return keys, values, queries, logits, exact


def _directions(rng, shape) -> np.ndarray:
    drawn = rng.normal(size=shape)
    return drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)


@functools.lru_cache(maxsize=256)
@np.errstate(over="ignore", invalid="ignore")
def errors(
    domain: Domain,
    n: int,
    multiplier: float,
    *,
    degree: int | None = None,
    num_features: int = 0,
    contribution_bound: float | None = None,
) -> tuple[float, float]:
    """Mean |error| of an entry with noise and without, of Taylor features or of random ones.

    In NumPy: compiling this for every size and temperature would take longer than the release.
    """
    rows = min(n, _ROWS)
    keys, values, queries, logits, exact = _memory(domain, rows)
    centred = keys - domain.centre
    weighed = np.concatenate([np.full((rows, 1), domain.mass_weight), values], axis=1)
    stretch = math.sqrt(domain.query_radius / domain.key_radius)
    if degree is None:
        directions: Any = _blocks(num_features, domain.dim)
        features: Features = RandomFeatures(directions, domain.scale)
        largest = largest_contribution(domain, features, contribution_bound)
        phi = _positive(features, stretch * centred)
        sizes = np.linalg.norm(phi, axis=1) * np.linalg.norm(weighed, axis=1)
        phi[~np.isfinite(sizes)] = 0
        weighed = weighed * np.minimum(1, largest / sizes)[:, None]
        read = _positive(features, queries / stretch)
        sums = (read @ (phi.T @ weighed) / rows)[:, None]
        norms = np.linalg.norm(read, axis=1)[:, None]
    else:
        features = PolynomialFeatures(domain.dim, degree, domain.scale)
        largest = largest_contribution(domain, features, None)
        # The constant feature apart, whose noise is the same in all answers.
        one, others = np.ones_like(logits), truncated_exponential(logits, degree)
        sums = np.stack([one @ weighed, (others - one) @ weighed], axis=1) / rows
        squares = truncated_exponential(np.square(queries / stretch).sum(1) / domain.scale, degree)
        norms = np.sqrt(np.stack([one[:, 0], squares - one[:, 0]], axis=1))
    std = multiplier * whole_change(features, domain, 1) * whole_unit(largest) / n
    noise = std * norms[..., None] * np.random.default_rng(1).normal(size=sums.shape)
    known = domain.public_count and degree is not None
    found = (_answers(domain, queries, part, known) - exact for part in (sums + noise, sums))
    error, bias = (float(np.abs(part).mean()) for part in found)
    return error, bias


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
def _blocks(num_features: int, dim: int) -> np.ndarray:
    """Directions as `RandomFeatures.draw` makes them."""
    rng = np.random.default_rng(2)
    rotations, _ = np.linalg.qr(rng.normal(size=(-(-num_features // dim), dim, dim)))
    lengths = np.linalg.norm(rng.normal(size=(num_features, dim)), axis=1, keepdims=True)
    return rotations.reshape(-1, dim)[:num_features] * lengths


def _positive(features: RandomFeatures, x: np.ndarray) -> np.ndarray:
    """Positive random features of x (n, d): (n, r)."""
    x = x / math.sqrt(features.scale or features.dim)
    exponents = x @ features.directions.T - np.square(x).sum(1, keepdims=True) / 2
    return np.exp(exponents) / math.sqrt(features.num_features)
