"""A cross-attention layer over a private memory, of which it keeps only a noisy sketch."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx._numerics import into_ball, is_traced
from dpx.attention import dot_product_attention
from dpx.cross_attention import sketch
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import Features, PolynomialFeatures, RandomFeatures
from dpx.privacy import (
    REPLACE_ONE,
    PrivacyGuarantee,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)


class Release(nnx.Variable):
    """A part of the release about a memory, which may be stored, copied and queried without limit."""


class PrivateCrossAttention(nnx.Module):
    """Multi-head cross-attention over a private memory, (ε, δ)-DP for replacing one of its rows.

    `remember` reads the memory once. The module keeps projections, noisy moments and the budget, but never
    keys or values; `nnx.state` saves these, and Orbax restores them into a layer with the same arguments.
    The projections of keys and values must not have been trained on the memory itself.

    Attributes (constructor arguments):
      query_dim: The width of the queries' input.
      memory_dim: The width of a row of the memory.
      num_heads, head_dim: H heads of width D; logits are ⟨q, k⟩/√D.
      out_dim: The width of the answers; `query_dim` if None.
      key_bound: Keys are rescaled to ‖k‖₂ ≤ key_bound in each head.
      query_bound: The same bound for queries; `key_bound` if None. Noise grows as
        e^{key_bound·query_bound/√D}.
      value_bound: Values are clipped to ±value_bound elementwise, or rescaled to ‖v‖₂ ≤ value_bound in each
        head with `value_domain="ball"`.
      features: "random", or "taylor" for small D.
      degree: The degree of Taylor features; by default the smallest that is accurate to 1e-4.
      num_features: The number of random features.
      rngs: Random keys for the initial projections and, from `params`, the public random directions.
    """

    def __init__(
        self,
        query_dim: int,
        memory_dim: int,
        *,
        num_heads: int,
        head_dim: int,
        key_bound: float,
        value_bound: float,
        value_domain: str = "box",
        query_bound: float | None = None,
        out_dim: int | None = None,
        features: str = "random",
        degree: int | None = None,
        num_features: int = 1024,
        rngs: nnx.Rngs,
    ):
        if min(query_dim, memory_dim, num_heads, head_dim, num_features) < 1:
            raise ValueError(
                f"query_dim={query_dim}, memory_dim={memory_dim}, num_heads={num_heads}, "
                f"head_dim={head_dim} and num_features={num_features} must be at least 1"
            )
        if features not in ("taylor", "random"):
            raise ValueError(f'features is {features!r}: use "taylor" or "random"')
        self.num_heads = num_heads
        self.domain = Domain(
            kind="ball",
            dim=head_dim,
            value_dim=head_dim,
            key_bound=float(key_bound),
            query_bound=float(key_bound if query_bound is None else query_bound),
            value_bound=float(value_bound),
            scale=math.sqrt(head_dim),
            value_domain=value_domain,
        )
        self.taylor: PolynomialFeatures | None = None
        directions = None
        if features == "taylor":
            degree = sketch.even_degree(degree, self.domain)
            self.taylor = PolynomialFeatures(head_dim, degree, self.domain.scale)
            num_features = self.taylor.num_features
        else:
            drawn = RandomFeatures.draw(rngs.params(), num_features, head_dim, self.domain.scale)
            directions = Release(drawn.directions)
        width = num_heads * head_dim
        self.query = nnx.Linear(query_dim, width, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(memory_dim, width, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(memory_dim, width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, query_dim if out_dim is None else out_dim, rngs=rngs)
        self.directions = nnx.data(directions)
        self.moments = Release(jnp.zeros((num_heads, num_features, 1 + head_dim)))
        self.budget = Release(
            jnp.zeros(2)
        )  # (ε, δ), rounded up to float32; zeros before `remember`

    def remember(self, key: jax.Array, memory: jax.Array, *, epsilon: float, delta: float) -> None:
        """Releases a private memory (n, memory_dim), to which the layer attends from then on.

        The budget is for the whole row: the heads' squared sensitivities add up, so that each head gets the
        noise of one of H composed releases. Each call spends its budget again, and `guarantee` covers all
        calls together, since an earlier memory may share rows with this one. Call it outside of `jit`, where
        sums have 64 bits (`sketch.build`).

        Args:
          key: The JAX key of the noise.
          memory: Private rows (n, memory_dim).
          epsilon, delta: The budget of all heads together.

        Raises:
          ValueError: for a memory of the wrong shape, or ε or δ out of range.
        """
        shape = np.shape(memory)
        if len(shape) != 2 or not shape[0] or shape[1] != self.key.in_features:
            raise ValueError(
                f"memory has shape {shape}: pass (n, {self.key.in_features}) with at least one row"
            )
        # NumPy's warning of overflow in 32 bits would reveal a row.
        with np.errstate(over="ignore"):
            memory = jnp.asarray(memory)
        released = sketch.build(
            key,
            self._heads(self.key(memory)),
            self._heads(self.value(memory)),
            domain=self.domain,
            features=self._features,
            epsilon=epsilon,
            delta=delta,
            clip=True,
        )
        self.moments[...] = released.means
        exact = np.array(self._composed(epsilon, delta))
        stored = exact.astype(np.float32)
        self.budget[...] = jnp.asarray(
            np.where(stored < exact, np.nextafter(stored, np.float32(np.inf)), stored)
        )

    def _composed(self, epsilon: float, delta: float) -> tuple[float, float]:
        """(ε, δ) of all releases so far, and a new one with that budget, by adding μ²."""
        spent_epsilon, spent_delta = (float(number) for number in np.asarray(self.budget[...]))
        if not spent_epsilon:
            return epsilon, delta
        budgets = ((spent_epsilon, spent_delta), (epsilon, delta))
        mu = math.hypot(*(1 / gaussian_noise_multiplier(*budget) for budget in budgets))
        delta = max(spent_delta, delta)
        return gaussian_epsilon(1 / mu, delta), delta

    @property
    def guarantee(self) -> PrivacyGuarantee:
        """The guarantee of all releases together, also after restoring (ε and δ are rounded up to float32).

        Raises:
          ValueError: if nothing was remembered.
        """
        epsilon, delta = (float(number) for number in np.asarray(self.budget[...]))
        if not epsilon:
            raise ValueError("nothing is remembered yet: call remember(key, memory, …) first")
        multiplier = gaussian_noise_multiplier(epsilon, delta)
        return PrivacyGuarantee(
            epsilon=epsilon,
            delta=delta,
            neighboring=REPLACE_ONE,
            unit="row of the memory",
            mechanism="Gaussian sketch, any number of queries, "
            f"budget split evenly over {self.num_heads} heads",
            assumptions=(
                "the number of rows is public",
                "the projections do not depend on the memory",
            ),
            event=dp_accounting.GaussianDpEvent(multiplier),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Attends from x (..., query_dim) to the memory: (..., out_dim).

        Raises:
          ValueError: outside `jit`, if nothing was remembered.
        """
        budget = self.budget[...]
        if not is_traced(budget) and not budget[0]:
            raise ValueError("nothing is remembered yet: call remember(key, memory, …) first")
        lead = x.shape[:-1]
        q = into_ball(self._heads(self.query(x.reshape(-1, x.shape[-1]))), self.domain.query_bound)
        answers = sketch.attend(self.moments[...], q, self.domain, self._features)
        return self.out(jnp.moveaxis(answers, 0, 1).reshape(*lead, -1))

    def over_public(self, x: jax.Array, memory: jax.Array) -> jax.Array:
        """The same layer over a public memory (n, memory_dim), without sketch and noise.

        `__call__` tends to it with many features and little noise. It is differentiable, so that it serves to
        train the projections on public memories, before the private one is remembered. Nothing is kept.
        """
        q = into_ball(self._heads(self.query(x.reshape(-1, x.shape[-1]))), self.domain.query_bound)
        heads = self._heads(self.key(memory)), self._heads(self.value(memory))
        k, v = self.domain.enter(*heads, clip=True)
        answers = dot_product_attention(q, k, v)
        return self.out(jnp.moveaxis(answers, 0, 1).reshape(*x.shape[:-1], -1))

    @property
    def _features(self) -> Features:
        if self.directions is None:
            assert self.taylor is not None
            return self.taylor
        return RandomFeatures(self.directions[...], self.domain.scale)

    def _heads(self, x: jax.Array) -> jax.Array:
        """(n, H·D) -> (H, n, D)."""
        return jnp.moveaxis(x.reshape(len(x), self.num_heads, -1), 1, 0)
