"""Private cross-attention from trees: Algorithms 1, 3 and 7 of Ke et al. (arXiv 2407.14717), errata mended.

The law of cosines turns attention's sums into distances between features, one coordinate at a time,

    Σ_i w_i⟨P(k_i), P(q)⟩ = ½ Σ_a (Σ_i w_i P_a(k_i)² + P_a(q)² Σ_i w_i − Σ_i w_i |P_a(k_i) − P_a(q)|²),

and each coordinate, for each column w of [constant, V], is a structure like `DPTreeDistance` with p = 2. The
sum Σ w_i P_a(k_i)² is its distance to 0, from the same trees. The constant feature's structure tells Σ w_i;
for the denominator that is n, which is public. These errors of the paper are mended:

- The root is never released. Bins and noise follow each feature's own range, R^{|a|}/√(a!·scale^{|a|}).
- There are r = C(s + d, d) features.
- The budget covers a whole answer: all d_v + 1 columns, not two of them.
- `budget="exact"` composes all L·3·r·(d_v + 1)·copies node levels at once, by the better of basic and
  advanced composition. `budget="paper"` keeps the paper's nested shares, with c = 0.1 where that is
  enough, and its one range Γ for all features, the largest.
- The noisy denominator is cut to its public range [n, n·e^{R‖q‖₁/scale}] and answers to ±R_w.

With Gaussian nodes all columns of a node are noised together, and the constant column is V = sup‖v‖₂. One
row then moves a level of all columns by at most 2·V·(range)^t in l2: if its two places share a node,
the value flips sign; if they do not, each node moves by √2·V.

Privacy against adaptive queries needs no copies, since nothing is drawn after `build`. `copies` > 1
answers by the median, as Algorithm 7 does, and splits the budget.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dpx import _validate
from dpx._numerics import wide_sums
from dpx.cross_attention import node_noise
from dpx.cross_attention.domain import Domain, check_memory
from dpx.cross_attention.features import PolynomialFeatures, check_features, smallest_degree
from dpx.cross_attention.node_sums import distance_table, distances, num_bins
from dpx.noise import TruncatedLaplace, check_finite, check_size
from dpx.privacy import REPLACE_ONE, PrivacyGuarantee

_MOMENTS = 3  # of each feature: p + 1 for p = 2
_MAX_BYTES = 4 * 2**30


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tables"],
    meta_fields=["domain", "features", "budget", "num_records", "guarantee"],
)
@dataclasses.dataclass(frozen=True)
class Trees:
    """Released trees: `query` is post-processing, `jit`- and `vmap`-able, for any number of queries.

    Attributes:
      tables: What the trees answer leaf by leaf, (copies, r, bins, 3, 1 + d_v).
      domain: The declared bounds.
      features: The features P.
      budget: "exact" or "paper".
      num_records: n, public.
      guarantee: What the release guarantees, for all queries together.
    """

    tables: jax.Array
    domain: Domain
    features: PolynomialFeatures
    budget: str
    num_records: int
    guarantee: PrivacyGuarantee

    def query(self, Q) -> jax.Array:
        """Private attention for queries Q (m, d): answers (m, d_v), within the values' bound.

        Raises:
          ValueError: for queries of the wrong shape or, outside `jit`, beyond the declared bound.
        """
        Q = self.domain.check_queries(Q)
        bound = 2 * self.domain.logit_bounds(Q)
        n = self.num_records
        return self.domain.ratio(self.sums(Q), n * jnp.ones_like(bound), n * jnp.exp(bound))

    def sums(self, Q: jax.Array) -> jax.Array:
        """The noisy sums behind the answers, Σ_i [V, v_i]·e^{⟨q, k_i⟩/scale}: (m, 1 + d_v)."""
        return _sums(self, jnp.asarray(Q, self.tables.dtype))


def choose_features(
    domain: Domain, degree: int | None = None, relative_error: float = 1e-4
) -> PolynomialFeatures:
    """The features of that degree for logits ⟨q, k⟩/scale of a domain.

    Args:
      domain: The declared bounds.
      degree: s. If None, the smallest even degree whose weights are off by at most `relative_error`.
      relative_error: Used where `degree` is None.

    Raises:
      ValueError: for too many features, or a number out of range.
    """
    if degree is None:
        _validate.check_positive(relative_error, "relative_error")
        degree = smallest_degree(0.0, 2 * domain.largest_logit, relative_error)
    return PolynomialFeatures(domain.dim, degree, domain.scale)


def build(
    key: jax.Array,
    K,
    V,
    *,
    domain: Domain,
    features: PolynomialFeatures,
    epsilon: float,
    delta: float,
    clip: bool = False,
    noise: str = "gaussian",
    budget: str = "exact",
    copies: int = 1,
    bins: int | None = None,
) -> Trees:
    """Releases trees over a private memory with (ε, δ)-differential privacy.

    One row of (K, V) is the record; neighbours replace one.

    Args:
      key: Secret randomness of the noise.
      K: Private keys (n, d) in [0, key_bound].
      V: Private values (n, d_v); within the domain.
      domain: The declared bounds, a box, since features must not be negative. One bound holds for keys and
        queries.
      features: See `choose_features`.
      epsilon: ε in (0, 1e8].
      delta: δ in (0, 1); at most 1/2 for truncated Laplace noise.
      clip: Clips rows into the bounds instead of raising.
      noise: "gaussian", or "truncated_laplace" as in the paper.
      budget: How truncated Laplace noise shares the budget: "exact" or "paper". Gaussian noise needs no
        sharing, since it is one release.
      copies: Independent structures whose median answers.
      bins: Leaves of a tree, rounded up to a power of two. If None: as many as rows for the paper's
        budget, and otherwise at most 1,024, where a query's own leaf (which no answer counts) costs a
        relative error of at most e^{R²}/(2·bins²).

    Returns:
      The trees, in JAX's default float type. Sums over rows and levels and the noise have 64 bits until then,
      except under a JAX transformation of the key or the data (`dpx._numerics.wide_sums`).

    Raises:
      ValueError: for ε or δ out of range, rows outside the bounds (the first is named), options that are not
        known or not affordable, or arrays that do not fit together.
    """
    n, _, _ = check_memory(K, V)
    if np.ndim(K) != 2:
        raise ValueError(f"K has shape {np.shape(K)}: trees take (n, d), use the sketch for heads")
    if domain.kind != "box" or domain.query_bound != domain.key_bound:
        raise ValueError(
            f'domain={domain.kind!r} with query_bound={domain.query_bound} must be "box" with the bound of '
            "the keys, since trees need features ≥ 0 in one range: use the sketch for any other"
        )
    check_features(features, domain)
    _validate.check_choice(budget, "budget", ("exact", "paper"))
    _validate.check_epsilon(epsilon)
    node_noise.check_noise(noise, _validate.check_delta(delta))
    copies = _validate.check_integer(copies, "copies")
    if bins is None and not (noise == "truncated_laplace" and budget == "paper"):
        bins = min(n, 1024)
    bins = num_bins(bins, n)
    _, _, ranges = _structures(domain, features, budget)
    size = 4 * copies * len(ranges) * bins * _MOMENTS * (1 + domain.value_dim)
    if size > _MAX_BYTES:
        raise ValueError(
            f"degree={features.degree} makes r = {features.num_features} features: trees of "
            f"{size / 2**30:.3g} GiB with {bins} bins and {copies} copies: use fewer bins or copies, or a "
            "lower degree"
        )
    depth = bins.bit_length() - 1
    nodes, event = _node_noise(noise, budget, ranges, domain, depth, copies, epsilon, delta)
    check_size("tree nodes", [domain.key_bound, domain.value_norm, *jax.tree.leaves(nodes)])
    K, V = domain.enter(K, V, clip=clip)
    guarantee = PrivacyGuarantee(
        epsilon=float(epsilon),
        delta=float(delta),
        neighboring=REPLACE_ONE,
        unit="row of (K, V)",
        mechanism=f"{copies}×{len(ranges)}×{_MOMENTS}×{1 + domain.value_dim} trees of {bins} bins with "
        f"{noise.replace('_', ' ')} noise in every node but the root, any number of queries",
        assumptions=("the number of rows is public",)
        + (() if clip else ("data within the declared bounds",)),
        event=event,
    )
    with wide_sums(key, K, V):
        tables = _release(key, K, V, nodes, domain, features, budget, bins, copies, noise)
    tables = check_finite(tables, "a table of trees")
    return Trees(tables, domain, features, budget, n, guarantee)


def _structures(
    domain: Domain, features: PolynomialFeatures, budget: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The feature behind each structure, its range, and the range that bins and noise assume: (S,) each.

    The first is the constant feature, which tells Σ w. The paper builds another for it, like any
    feature's, and assumes one range for all.
    """
    index, own = np.arange(features.num_features), features.ranges(domain.key_bound)
    if budget == "exact":
        return index, own, own
    index = np.insert(index, 0, 0)
    return index, own[index], np.full(len(index), own.max())


def _node_noise(noise, budget, ranges, domain: Domain, depth, copies, epsilon, delta):
    """Each feature's noise, arrays (r, 3), and the DpEvent if there is one."""
    count, columns = len(ranges), 1 + domain.value_dim
    if noise == "gaussian":
        change = 2 * domain.value_norm * math.sqrt(copies)
        return node_noise.gaussian_nodes(ranges, _MOMENTS - 1, depth, change, epsilon, delta)
    levels = depth * _MOMENTS
    if budget == "exact":
        shares = [
            node_noise.split_budget(epsilon, delta, levels * count * columns * copies)
        ] * count
    else:
        first, others = node_noise.paper_budget(epsilon, delta, count - 1, columns * copies)
        shares = [(e / levels, d / levels) for e, d in [first] + [others] * (count - 1)]
    laws = [TruncatedLaplace.calibrate(2 * domain.value_bound, e, d) for e, d in shares]
    return node_noise.laplace_nodes(laws, _MOMENTS - 1, depth * 2 * domain.value_bound), None


@functools.partial(
    jax.jit, static_argnames=("domain", "features", "budget", "bins", "copies", "noise")
)
def _release(key, K, V, nodes, domain: Domain, features, budget, bins, copies, noise) -> jax.Array:
    constant = domain.value_norm if noise == "gaussian" else domain.value_bound
    weights = jnp.concatenate([jnp.full((len(V), 1), constant, V.dtype), V], axis=1)
    unit = K / domain.key_bound
    index, own, assumed = _structures(domain, features, budget)

    def structure(args):
        feature_key, exponents, share, own = args
        x = share * jnp.prod(unit**exponents, axis=-1)
        own = jax.tree.map(lambda a: a[:, None], own)
        return distance_table(
            feature_key,
            x,
            weights,
            power=_MOMENTS - 1,
            bins=bins,
            nodes=own,
            parts=copies * len(index),
        )

    def copy(copy_key):
        keys = jax.random.split(copy_key, len(index))
        shares = jnp.asarray(own / assumed, K.dtype)
        return jax.lax.map(structure, (keys, jnp.asarray(features.exponents[index]), shares, nodes))

    tables = jax.lax.map(copy, jax.random.split(key, copies))
    return tables.at[..., 0].multiply(domain.value_norm / constant)


@jax.jit
def _sums(released: Trees, Q: jax.Array) -> jax.Array:
    domain, features, tables = released.domain, released.features, released.tables
    index, _, ranges = _structures(domain, features, released.budget)
    ranges = jnp.asarray(ranges, tables.dtype)
    n = released.num_records

    def one_copy(table):
        total = (
            (ranges[0] ** 2 * table[0, 0, -1]).at[0].set(n * domain.value_norm)
        )  # Σ w: the distance of all ones to 0
        # The paper's own structure for the constant feature stands for it, noisier.
        known = jnp.zeros_like(total) if released.budget == "paper" else total

        def chunk(q):
            y = jnp.clip(features(q)[index] / ranges, 0, 1)[1:]
            distance = distances(table[1:], y)
            squares = table[1:, 0, -1]  # the distance to 0
            cosines = squares + jnp.square(y)[:, None] * total - distance
            return known + 0.5 * jnp.einsum(
                "a,ac->c",
                jnp.square(ranges[1:]),
                cosines,
                precision=jax.lax.Precision.HIGHEST,
            )

        return jax.lax.map(chunk, Q, batch_size=256)

    return jnp.median(jax.lax.map(one_copy, tables), axis=0)
