"""Private cross-attention from trees: Algorithms 1, 3 and 7 of Ke et al. (arXiv 2407.14717), errata mended.

The law of cosines turns attention's sums into distances between features, one coordinate at a time,

    Σ_i w_i⟨P(k_i), P(q)⟩ = ½ Σ_a (Σ_i w_i P_a(k_i)² + P_a(q)² Σ_i w_i − Σ_i w_i |P_a(k_i) − P_a(q)|²),

and each coordinate, for each column w of [constant, V], is a `dpx.cross_attention.tree_sums` structure
with p = 2 (Σ w_i P_a(k_i)² is its distance to 0, from the same trees). The constant feature's structure
tells Σ w_i; for the denominator that is n, which is public. What is mended:

- The root is never released. Bins and noise follow each feature's own range, R^{|a|}/√(a!·scale^{|a|}).
- There are r = C(s + d, d) features.
- The budget covers a whole answer: all d_v + 1 columns, not two of them.
- `budget="exact"` composes all L·3·r·(d_v + 1)·copies node levels at once, by the better of basic and
  advanced composition. `budget="paper"` keeps the paper's nested shares, with c = 0.1 where that is
  enough, and its one range Γ for all features, the largest.
- The noisy denominator is cut to its public range [n, n·e^{R‖q‖₁/scale}] and answers to ±R_w.

With Gaussian nodes all columns of a node are noised together, the constant column being √d_v·R_w: one row
then moves a level of all columns by 2·√d_v·R_w·(range)^t at most in l2 (if its two places share a node,
the value flips sign; if not, each node moves by √2·√d_v·R_w).

Privacy against adaptive queries needs no copies, since nothing is drawn after `build`. `copies` > 1
answers by the median, as Algorithm 7 does, and splits the budget.
"""

import dataclasses
import functools
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from dpx._numerics import wide_sums
from dpx._validate import check_delta, check_epsilon, check_integer, check_number
from dpx.cross_attention import tree_sums as trees
from dpx.cross_attention.domain import Domain, check_memory
from dpx.cross_attention.features import PolynomialFeatures, smallest_degree
from dpx.noise import Gaussian, TruncatedLaplace, check_finite, check_size
from dpx.privacy import (
    REPLACE_ONE,
    PrivacyGuarantee,
    gaussian_noise_multiplier,
)

_MOMENTS = 3  # of each feature: p + 1 for p = 2
_PAPER_CONSTANT = 0.1  # c of Algorithm 3
_MAX_BYTES = 4 * 2**30


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tables"],
    meta_fields=["domain", "degree", "budget", "num_records", "guarantee"],
)
@dataclasses.dataclass(frozen=True)
class Trees:
    """Released trees: `query` is post-processing, `jit`- and `vmap`-able, for any number of queries.

    Attributes:
      tables: What the trees answer leaf by leaf, (copies, r, bins, 3, 1 + d_v).
      domain: The declared bounds.
      degree: The features' degree s.
      budget: "exact" or "paper".
      num_records: n, public.
      guarantee: What the release guarantees, for all queries together.
    """

    tables: jax.Array
    domain: Domain
    degree: int
    budget: str
    num_records: int
    guarantee: PrivacyGuarantee

    def query(self, Q) -> jax.Array:
        """Private attention for queries Q (m, d): answers (m, d_v), within ±value_bound.

        Raises:
          ValueError: for queries of the wrong shape or, outside `jit`, beyond the declared bound.
        """
        Q = self.domain.check_queries(Q)
        bound = 2 * self.domain.logit_bounds(Q)
        n = self.num_records
        return self.domain.ratio(self.sums(Q), n * jnp.ones_like(bound), n * jnp.exp(bound))

    def sums(self, Q: jax.Array) -> jax.Array:
        """The noisy sums behind the answers, Σ_i [√d_v·R_w, v_i]·e^{⟨q, k_i⟩/scale}: (m, 1 + d_v)."""
        return _sums(self, jnp.asarray(Q, self.tables.dtype))


def build(
    key: jax.Array,
    K,
    V,
    *,
    key_bound: float,
    value_bound: float,
    epsilon: float,
    delta: float,
    domain: str = "box",
    scale: float | None = None,
    clip: bool = False,
    noise: str = "gaussian",
    budget: str = "exact",
    copies: int = 1,
    bins: int | None = None,
    degree: int | None = None,
    relative_error: float = 1e-4,
) -> Trees:
    """Releases trees over a private memory with (ε, δ)-differential privacy.

    One row of (K, V) is the record; neighbours replace one.

    Args:
      key: Secret randomness of the noise.
      K: Private keys (n, d) in [0, key_bound].
      V: Private values (n, d_v), ±value_bound elementwise.
      key_bound: R, of keys and queries.
      value_bound: R_w.
      epsilon: ε in (0, 1e8].
      delta: δ in (0, 1); at most 1/2 for truncated Laplace noise.
      domain: Only "box": features must not be negative.
      scale: What logits are divided by; d if None.
      clip: Clips rows into the bounds instead of raising.
      noise: "gaussian", or "truncated_laplace" as in the paper.
      budget: How truncated Laplace noise shares the budget: "exact" or "paper"; one Gaussian release needs no
        sharing.
      copies: Independent structures whose median answers.
      bins: Leaves of a tree, rounded up to a power of two. If None: as many as rows for the paper's
        budget, and 1,024 at most otherwise, where a query's own leaf (which no answer counts) costs a
        relative error of e^{R²}/(2·bins²) at most.
      degree: s; if None the smallest even degree whose weights are off by `relative_error` at most.
      relative_error: Used where `degree` is None.

    Returns:
      The trees, in JAX's default float type. Sums over rows and levels and the noise are 64-bit until then,
      except under a JAX transformation of the key or the data (`wide_sums`).

    Raises:
      ValueError: for bounds, ε or δ out of range, rows outside the bounds (the first is named), options that
        are not known or not affordable, or arrays that do not fit together.
    """
    n, dim, value_dim = check_memory(K, V)
    if np.ndim(K) != 2:
        raise ValueError(f"K has shape {np.shape(K)}: trees take (n, d), use the sketch for heads")
    bounds = Domain(
        kind=domain,
        dim=dim,
        value_dim=value_dim,
        key_bound=check_number(key_bound, "key_bound"),
        query_bound=check_number(key_bound, "key_bound"),
        value_bound=check_number(value_bound, "value_bound"),
        scale=check_number(dim if scale is None else scale, "scale"),
    )
    if domain != "box":
        raise ValueError(f'domain is {domain!r}: trees need features ≥ 0, use "box" or the sketch')
    for name, value, known in (
        ("noise", noise, trees.NOISES),
        ("budget", budget, ("exact", "paper")),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}: use one of {', '.join(known)}")
    check_epsilon(epsilon)
    check_delta(delta)
    if noise == "truncated_laplace" and delta > 0.5:
        raise ValueError(f"delta is {delta}: truncated Laplace noise needs delta ≤ 1/2")
    copies = check_integer(copies, "copies")
    if degree is None:
        check_number(relative_error, "relative_error")
        degree = smallest_degree(0.0, 2 * bounds.largest_logit, relative_error)
    features = PolynomialFeatures(dim, degree, bounds.scale)
    degree = features.degree
    if bins is None and not (noise == "truncated_laplace" and budget == "paper"):
        bins = min(n, 1024)
    bins = trees.num_bins(bins, n)
    _, _, ranges = _structures(bounds, degree, budget)
    size = 4 * copies * len(ranges) * bins * _MOMENTS * (1 + value_dim)
    if size > _MAX_BYTES:
        raise ValueError(
            f"degree {degree} makes r = {features.num_features} features: trees of {size / 2**30:.3g} GiB "
            f"with {bins} bins and {copies} copies: use fewer bins or copies, or a lower degree"
        )
    depth = bins.bit_length() - 1
    nodes, event = _node_noise(noise, budget, ranges, bounds, depth, copies, epsilon, delta)
    check_size("tree nodes", [bounds.key_bound, bounds.value_norm, *jax.tree.leaves(nodes)])
    K, V = bounds.enter(K, V, clip=clip)
    guarantee = PrivacyGuarantee(
        epsilon=float(epsilon),
        delta=float(delta),
        neighboring=REPLACE_ONE,
        unit="row of (K, V)",
        mechanism=f"{copies}×{len(ranges)}×{_MOMENTS}×{1 + value_dim} trees of {bins} bins with "
        f"{noise.replace('_', ' ')} noise in every node but the root, any number of queries",
        assumptions=("the number of rows is public",)
        + (() if clip else ("data within the declared bounds",)),
        event=event,
    )
    with wide_sums(key, K, V):
        tables = _release(key, K, V, nodes, bounds, degree, budget, bins, copies, noise)
    tables = check_finite(tables, "a table of trees")
    return Trees(tables, bounds, degree, budget, n, guarantee)


def _structures(
    domain: Domain, degree: int, budget: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The feature behind each structure, its range, and the range that bins and noise assume: (S,) each.

    The first is the constant feature, which tells Σ w. The paper builds another for it, like any
    feature's, and assumes one range for all.
    """
    features = PolynomialFeatures(domain.dim, degree, domain.scale)
    index, own = np.arange(features.num_features), features.ranges(domain.key_bound)
    if budget == "exact":
        return index, own, own
    index = np.insert(index, 0, 0)
    return index, own[index], np.full(len(index), own.max())


def _node_noise(noise, budget, ranges, domain: Domain, depth, copies, epsilon, delta):
    """Each feature's noise, arrays (r, 3), and the DpEvent if there is one."""
    count, columns = len(ranges), 1 + domain.value_dim
    if noise == "gaussian":
        multiplier = gaussian_noise_multiplier(epsilon, delta)
        unit = trees.gaussian_stds(
            ranges, _MOMENTS - 1, depth, 2 * domain.value_norm, math.sqrt(copies)
        )
        law = Gaussian(multiplier * unit)  # type: ignore[arg-type]
        return trees.NodeNoise(law, unit), dp_accounting.GaussianDpEvent(multiplier)
    levels = depth * _MOMENTS
    if budget == "exact":
        shares = [trees.split_budget(epsilon, delta, levels * count * columns * copies)] * count
    else:
        first, others = paper_shares(epsilon, delta, count - 1, columns * copies)
        shares = [(e / levels, d / levels) for e, d in [first] + [others] * (count - 1)]
    laws = [TruncatedLaplace.calibrate(2 * domain.value_bound, e, d) for e, d in shares]
    return trees.laplace_nodes(laws, _MOMENTS - 1, depth * 2 * domain.value_bound), None


def paper_shares(
    epsilon: float, delta: float, features: int, structures: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The paper's budget for Σ w and for each of r features, (ε, δ) each (Algorithm 3).

    ε and δ are divided evenly over the structures (Remark 4.2: one for each column, times copies) and half of
    δ becomes the slack δ'. A structure spends ε/3 on Σ w and cε/(3√(r log(2/δ'))) on each feature; where
    advanced composition does not bring these to 2ε/3, which happens for large ε, they share 2ε/3 by basic
    composition instead.
    """
    epsilon, delta, slack = epsilon / structures, delta / structures / 2, delta / structures / 2
    each = _PAPER_CONSTANT * epsilon / (3 * math.sqrt(features * math.log(2 / slack)))
    if each > 50 or trees.advanced_composition(each, features, slack) > 2 * epsilon / 3:
        each = 2 * epsilon / (3 * features)
    return (epsilon / 3, delta / 3), (each, delta / (3 * features))


@functools.partial(
    jax.jit, static_argnames=("domain", "degree", "budget", "bins", "copies", "noise")
)
def _release(key, K, V, nodes, domain: Domain, degree, budget, bins, copies, noise) -> jax.Array:
    features = PolynomialFeatures(domain.dim, degree, domain.scale)
    constant = domain.value_norm if noise == "gaussian" else domain.value_bound
    weights = jnp.concatenate([jnp.full((len(V), 1), constant, V.dtype), V], axis=1)
    unit = K / domain.key_bound
    index, own, assumed = _structures(domain, degree, budget)

    def structure(args):
        feature_key, exponents, share, own = args
        x = share * jnp.prod(unit**exponents, axis=-1)
        own = jax.tree.map(lambda a: a[:, None], own)
        return trees.distance_table(
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
    domain, tables = released.domain, released.tables
    features = PolynomialFeatures(domain.dim, released.degree, domain.scale)
    index, _, ranges = _structures(domain, released.degree, released.budget)
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
            distance = trees.distances(table[1:], y)
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
