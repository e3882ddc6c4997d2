"""Feature maps whose inner products approximate e^{⟨x, y⟩/scale}, so that no n × n matrix is needed.

`PolynomialFeatures` are all monomials of degree ≤ s with the coefficients of the exponential series,

    P(x)_a = x^a / √(a!·scale^{|a|}),   P(x)ᵀP(y) = T_s(⟨x, y⟩/scale),   T_s(z) = Σ_{t ≤ s} z^t / t!.

There are r = C(s + d, d) of them, not C(2s + 2d, 2s) as in Ke et al. (arXiv 2407.14717, Lemma G.2), and each
has a range of its own. `RandomFeatures` are for dimensions in which r is too large: positive, orthogonal
random features (Choromanski et al. 2021, arXiv 2009.14794), drawn without looking at any data.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from dpx._validate import check_integer, check_positive
from dpx.cross_attention.domain import Domain

MAX_FEATURES = 2**22
# The most factors between barriers: compilers reorder longer products, in which coefficients may underflow.
_PRODUCTS = 16


def truncated_exponential(z: Any, degree: int) -> Any:
    """T_s(z) = Σ_{t ≤ s} z^t/t! for the degree s, of a number or of each entry of an array."""
    term = total = 1.0 if np.ndim(z) == 0 else np.ones_like(z)
    for t in range(1, degree + 1):
        term = term * z / t
        total = total + term
    return total


def relative_error(degree: int, low: float, high: float) -> float:
    """The largest |1 − T_s(z)/e^z| over z in [low, high], low ≤ 0 ≤ high.

    1 − T_s(z)e^{−z} has derivative e^{−z} z^s/s!, so that its modulus increases with |z| on either side of 0.
    The maximum is at an end of the interval: ∫₀^high e^{−u} u^s/s! du or ∫₀^|low| e^u u^s/s! du.
    """
    below = -low
    left = 0.0
    if below > 0:
        log_front = (degree + 1) * math.log(below) - math.lgamma(degree + 2)
        left = math.exp(min(log_front, 700.0)) * float(
            special.hyp1f1(degree + 1, degree + 2, below)
        )
    return max(left, float(special.gammainc(degree + 1, high)))


def smallest_degree(low: float, high: float, tolerance: float = 1e-4) -> int:
    """The smallest even degree whose `relative_error` on [low, high] is at most `tolerance`.

    The degree is even, because T_s > 0 everywhere for even s only, and both attention weights and the
    sensitivity of the sketch need that.

    Raises:
      ValueError: if no degree up to 400 is enough.
    """
    # For larger |z| the error is near 1 at all such degrees, and the series of the integrals take for ever.
    follows = max(-low, high) <= 400
    for degree in range(0, 402, 2) if follows else ():
        if relative_error(degree, low, high) <= tolerance:
            return degree
    raise ValueError(
        f"exponents reach [{low:.4g}, {high:.4g}], beyond what a polynomial of degree 400 follows to "
        f"{tolerance}: use smaller bounds or a larger scale"
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PolynomialFeatures:
    """The feature map P: R^dim → R^r, r = C(degree + dim, dim); call it on (..., dim) arrays.

    Attributes:
      dim: d.
      degree: s.
      scale: The number that inner products are divided by inside the exponential; `dim` if None.

    Raises:
      ValueError: for a dimension < 1, a degree < 0, a scale ≤ 0 or more than `MAX_FEATURES` features; when
        called, for arrays of another dimension.
    """

    dim: int
    degree: int
    scale: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "dim", check_integer(self.dim, "dim"))
        object.__setattr__(self, "degree", check_integer(self.degree, "degree", 0))
        if self.scale is not None:
            check_positive(self.scale, "scale")
        if self.num_features > MAX_FEATURES:
            raise ValueError(
                f"degree {self.degree} in {self.dim} dimensions makes r = {self.num_features} features "
                f"({4 * self.num_features / 2**30:.3g} GiB a row), beyond {MAX_FEATURES}: use a lower "
                "degree, smaller bounds, a larger scale or random features"
            )

    @property
    def num_features(self) -> int:
        """r = C(s + d, d)."""
        return math.comb(self.degree + self.dim, self.dim)

    @functools.cached_property
    def exponents(self) -> np.ndarray:
        """The multi-indices a (r, dim), ordered by degree; the constant feature comes first."""
        parents, variables = self._recipe
        exponents = np.zeros((self.num_features, self.dim), np.int32)
        start = 1
        for parent, variable in zip(parents, variables, strict=True):
            stop = start + len(parent)
            exponents[start:stop] = exponents[parent]
            exponents[np.arange(start, stop), variable] += 1
            start = stop
        return exponents

    def ranges(self, bound: float) -> np.ndarray:
        """The largest value of each feature on [0, bound]^dim: R^{|a|} / √(a!·scale^{|a|}), (r,)."""
        total = self.exponents.sum(-1)
        factorials = np.array([math.lgamma(t + 1) for t in range(self.degree + 1)])
        return np.exp(
            total * math.log(bound / math.sqrt(self._scale))
            - 0.5 * factorials[self.exponents].sum(-1)
        )

    def norm(self, logit: float) -> float:
        """√T_s(logit), the norm of P(x) for ‖x‖² = logit·scale."""
        return math.sqrt(truncated_exponential(logit, self.degree))

    def __call__(self, x: jax.Array) -> jax.Array:
        """P(x): (..., dim) -> (..., r)."""
        return jnp.moveaxis(self.rows(jnp.moveaxis(self._entering(x, -1), -1, 0)), 0, -1)

    def rows(self, x: jax.Array) -> jax.Array:
        """P with features as the first axis, (dim, ...) -> (r, ...), which is the fastest layout.

        Each feature is one product, of a feature of one degree less and a coordinate.
        """
        x = self._entering(x, 0)
        x = x / jnp.asarray(math.sqrt(self._scale), x.dtype)
        start, previous = 0, jnp.ones((1, *x.shape[1:]), x.dtype)
        blocks = [previous]
        for parents, variables in zip(*self._recipe, strict=True):
            stop = start + len(previous)
            exponents = self.exponents[stop : stop + len(parents)]
            last = exponents[np.arange(len(parents)), variables]
            factor = (1 / np.sqrt(last)).astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
            previous = previous[parents - start] * (x[variables] * factor)
            if len(blocks) % _PRODUCTS == 0:
                previous = jax.lax.optimization_barrier(previous)
            blocks.append(previous)
            start = stop
        return jnp.concatenate(blocks)

    def _entering(self, x, axis: int) -> jax.Array:
        """x as floats, after a check that `axis` holds the coordinates."""
        x = jnp.asarray(x)
        if not x.ndim or x.shape[axis] != self.dim:
            raise ValueError(
                f"x has shape {x.shape}: its axis {axis} must be of size dim={self.dim}"
            )
        return x.astype(jnp.result_type(x, 0.0))

    @property
    def _scale(self) -> float:
        return float(self.dim if self.scale is None else self.scale)

    @functools.cached_property
    def _recipe(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """For each degree ≥ 1, the index of every feature's parent and the coordinate that multiplies it.

        A monomial's parent lacks one factor of its last coordinate, so that every monomial has one parent.
        """
        parents, variables = [], []
        indices, last = np.zeros(1, np.int64), np.zeros(1, np.int64)
        start = 1
        for _ in range(self.degree):
            repeats = self.dim - last
            parent = np.repeat(indices, repeats)
            offset = np.arange(len(parent)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            last = np.repeat(last, repeats) + offset
            parents.append(parent)
            variables.append(last)
            indices = np.arange(start, start + len(parent))
            start += len(parent)
        return parents, variables


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["directions"], meta_fields=["scale"]
)
@dataclasses.dataclass(frozen=True)
class RandomFeatures:
    """Positive random features φ: R^dim → R^r; call it on (..., dim) arrays.

    φ(x)_j = exp(⟨ω_j, x⟩/√scale − ‖x‖²/(2·scale)) / √r, with E⟨φ(x), φ(y)⟩ = e^{⟨x, y⟩/scale}
    (Choromanski et al. 2021, arXiv 2009.14794, Lemma 1).

    Attributes:
      directions: The public ω, (r, dim), which `draw` makes.
      scale: The number that inner products are divided by inside the exponential; `dim` if None.
    """

    directions: jax.Array
    scale: float | None = None

    @classmethod
    def draw(
        cls, key: jax.Array, num_features: int, dim: int, scale: float | None = None
    ) -> "RandomFeatures":
        """Draws the directions, which are orthogonal in blocks of `dim`, and each marginally N(0, I).

        Args:
          key: A public JAX key: no noise follows from it, and the directions are part of the release.
          num_features: r.
          dim: The dimension of the vectors.
          scale: As the attribute.

        Raises:
          ValueError: for a number of features or a dimension < 1, or a scale ≤ 0.
        """
        num_features = check_integer(num_features, "num_features")
        dim = check_integer(dim, "dim")
        if scale is not None:
            check_positive(scale, "scale")
        blocks = -(-num_features // dim)
        rotation_key, norm_key = jax.random.split(key)
        rotations = jax.random.orthogonal(rotation_key, dim, (blocks,)).reshape(-1, dim)
        norms = jax.random.normal(norm_key, rotations.shape)
        norms = jnp.linalg.norm(norms, axis=-1, keepdims=True)
        return cls((rotations * norms)[:num_features], scale)

    @property
    def num_features(self) -> int:
        """r."""
        return len(self.directions)

    @property
    def dim(self) -> int:
        """d."""
        return self.directions.shape[1]

    def norm(self, logit: float) -> float:
        """√E‖φ(x)‖² for ‖x‖² = logit·scale. It is a mean and no bound: a single vector may be longer."""
        return math.exp(min(logit / 2, 300.0))  # e^300 is far too large anyway

    def __call__(self, x: jax.Array) -> jax.Array:
        """φ(x): (..., dim) -> (..., r)."""
        return jnp.moveaxis(self.rows(jnp.moveaxis(jnp.asarray(x), -1, 0)), 0, -1)

    def rows(self, x: jax.Array) -> jax.Array:
        """φ with features as the first axis: (dim, ...) -> (r, ...)."""
        x = jnp.asarray(x)
        x = x.astype(jnp.result_type(x, 0.0))  # integers would drop a fraction of scale
        x = x / jnp.asarray(math.sqrt(self.scale or self.dim), x.dtype)
        exponents = jnp.tensordot(self.directions, x, axes=1) - 0.5 * jnp.square(x).sum(0)
        return jnp.exp(exponents) / math.sqrt(self.num_features)


Features = PolynomialFeatures | RandomFeatures


def check_features(features: Features, domain: Domain) -> None:
    """Raises ValueError unless features have the domain's dimension and scale."""
    if (features.dim, features.scale or features.dim) != (domain.dim, domain.scale):
        raise ValueError(
            f"features of dim={features.dim} and scale={features.scale} must be those of the domain: use "
            f"dim={domain.dim} and scale={domain.scale}"
        )
