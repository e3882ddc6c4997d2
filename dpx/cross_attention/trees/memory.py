"""Private cross-attention from trees: Algorithms 1, 3 and 7 of Ke et al. (arXiv 2407.14717), corrected.

The law of cosines turns attention's sums into distances between features, one coordinate at a time,

    Σ_i w_i⟨P(k_i), P(q)⟩ = ½ Σ_a (Σ_i w_i P_a(k_i)² + P_a(q)² Σ_i w_i − Σ_i w_i |P_a(k_i) − P_a(q)|²),

and each coordinate, for each column w of [constant, V], is a structure like `DPTreeDistance` with p = 2. The
sum Σ w_i P_a(k_i)² is its distance to 0, from the same trees. Σ w_i comes from the structure of the constant
feature; for the denominator it is n, which is public. These errors of the paper are corrected:

- The root is never released. Bins and noise are scaled to each feature's range, R^{|a|}/√(a!·scale^{|a|}).
- There are r = C(s + d, d) features.
- The budget covers a whole answer: all d_v + 1 columns, not two of them.
- `budget="exact"` composes all L·3·r·(d_v + 1)·copies node levels at once, by the better of basic and
  advanced composition. `budget="paper"` keeps the paper's nested shares, with c = 0.1 if that is enough, and
  its single range Γ for all features, which is the largest.
- The noisy denominator is clipped to its public range [n, n·e^{R‖q‖₁/scale}], and answers to ±R_w.

With Gaussian nodes, noise is added to all columns of a node together, and the constant column is V = sup‖v‖₂.
Replacing one row then moves a level of all columns by at most 2·V·(range)^t in l2: if both rows are in the
same node, the value may flip its sign; if they are in two nodes, each of these moves by at most √2·V.

Privacy against adaptive queries needs no copies, since nothing is drawn after `build`. With `copies` > 1 an
answer is the median, as in Algorithm 7, and the copies share the budget.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx import _validate
from dpx._numerics import is_traced, promoting, rounding_assumption, wide_sums
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import PolynomialFeatures, smallest_degree
from dpx.cross_attention.trees import leaf_sums, node_noise
from dpx.cross_attention.trees.node_sums import distance_tables, num_bins
from dpx.cross_attention.trees.structures import MOMENTS, Structures
from dpx.noise import check_finite, check_size, secure
from dpx.privacy import REPLACE_ONE, PrivacyGuarantee
from dpx.release import Partial, are_summed, total

_MAX_BYTES = 4 * 2**30


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tables"],
    meta_fields=["domain", "features", "budget", "num_records", "guarantee"],
)
@dataclasses.dataclass(frozen=True)
class Trees:
    """Released trees. `query` is post-processing, for any number of queries, and works in `jit` and `vmap`.

    Attributes:
      tables: The answers of the trees for each leaf, (copies, r, bins, 3, 1 + d_v).
      domain: The declared bounds.
      features: The features P.
      budget: "exact" or "paper".
      num_records: n, which is public.
      guarantee: The guarantee for all queries together.
    """

    tables: jax.Array
    domain: Domain
    features: PolynomialFeatures
    budget: str
    num_records: int
    guarantee: PrivacyGuarantee

    @promoting
    def query(self, Q) -> jax.Array:
        """Private attention for queries Q (m, d): answers (m, d_v), within the values' bound.

        Raises:
          ValueError: for queries of the wrong shape or, outside `jit`, beyond the declared bound.
        """
        Q = self.domain.check_queries(Q)
        bound = 2 * self.domain.logit_bounds(Q)
        n = self.num_records
        return self.domain.ratio(self.sums(Q), n * jnp.ones_like(bound), n * jnp.exp(bound))

    @promoting
    def sums(self, Q: jax.Array) -> jax.Array:
        """The noisy sums behind the answers, Σ_i [V, v_i]·e^{⟨q, k_i⟩/scale}: (m, 1 + d_v).

        Raises:
          ValueError: for queries that are not one matrix of real numbers.
        """
        _validate.check_real(Q, "Q")
        if np.ndim(Q) != 2:
            raise ValueError(f"Q has shape {np.shape(Q)}: trees answer (m, d), so pass one matrix")
        Q = jnp.asarray(Q, self.tables.dtype)
        structures = Structures(self.domain, self.features, budget=self.budget)
        return structures.read(self.tables, Q, self.num_records)


def choose_features(
    domain: Domain, degree: int | None = None, relative_error: float = 1e-4
) -> PolynomialFeatures:
    """The features of that degree for logits ⟨q, k⟩/scale of a domain.

    Args:
      domain: The declared bounds.
      degree: s. If None, the smallest even degree for which weights have at most `relative_error`.
      relative_error: Used if `degree` is None.

    Raises:
      ValueError: for too many features, or a number out of range.
    """
    if degree is None:
        _validate.check_positive(relative_error, "relative_error")
        degree = smallest_degree(0.0, 2 * domain.largest_logit, relative_error)
    return PolynomialFeatures(domain.dim, degree, domain.scale)


def build(
    key: jax.Array,
    K: Any,
    V: Any = None,
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
      key: The JAX key of the noise.
      K: Private keys (n, d) in [0, key_bound]. Or `dpx.release.Blocks` of (K, V), or a sum that `statistic`
        made of them; then `bins` has to be given.
      V: Private values (n, d_v) within the domain. None with blocks.
      domain: The declared bounds. They have to be a box, since features must not be negative, with the same
        bound for keys and queries.
      features: See `choose_features`.
      epsilon: ε in (0, 1e8].
      delta: δ in (0, 1); at most 1/2 for truncated Laplace noise.
      clip: Whether rows are clipped into the bounds; with False, a row outside raises an error.
      noise: "gaussian", or "truncated_laplace" as in the paper.
      budget: "exact" or "paper": how truncated Laplace noise divides the budget among trees. Gaussian noise
        does not divide it, since it is one release.
      copies: The number of independent structures; the answer is their median.
      bins: The number of leaves of a tree, rounded up to a power of two. If None, the number of rows for the
        paper's budget, and otherwise at most 1,024. An answer leaves out its own leaf, which causes a
        relative error of at most e^{R²}/(2·bins²).

    Returns:
      The trees, in JAX's default float type. Before they are rounded to that type, sums are of integers and
      noise has 64 bits. Under a JAX transformation of the data, sums are of floats of the default type; under
      one of the key, noise has that type (`dpx._numerics.wide_sums`).

    Raises:
      ValueError: for ε or δ out of range, rows outside the bounds (the first is named), options that are
        unknown or that the budget does not allow, or arrays that do not fit together.
    """
    secure.check(key, False)
    rows = None if are_summed(K) else _check_rows(K, V, domain)
    if rows and bins is None and not (noise == "truncated_laplace" and budget == "paper"):
        bins = min(rows, 1024)
    bins = num_bins(bins, rows)
    structures = Structures(domain, features, noise, budget)
    options = vars(structures) | {"bins": bins, "clip": clip}
    nodes, guarantee = _planned(structures, bins, copies, clip, epsilon, delta)
    if is_traced(K, V):
        K, V = domain.enter(K, V, clip=clip)
        n, known, unit = len(K), (key, K, V), 1.0
        with wide_sums(*known):
            leaves = structures.traced_leaves(K, V, bins)
    else:
        summed = total(functools.partial(statistic, **options), K, V)
        (leaves,) = summed.check("trees of a memory", **options).sums
        n, leaves = summed.num_records, leaves.astype(np.float64)
        known, unit = (key,), leaf_sums.unit(structures.longest)
    dtype = jnp.result_type(float)
    with wide_sums(*known):
        tables = distance_tables(jax.random.split(key, copies), leaves, nodes, unit)
        # In the trees, the constant column has the value for which the noise was calibrated.
        tables = tables.at[..., 0].multiply(domain.value_norm / structures.constant)
        tables = check_finite(tables.astype(dtype), "a table of trees")
        guarantee = guarantee.assuming(*rounding_assumption(*known))
        return Trees(tables, domain, features, budget, n, guarantee)


def statistic(
    block,
    *,
    domain: Domain,
    features: PolynomialFeatures,
    bins: int,
    clip: bool = False,
    noise: str = "gaussian",
    budget: str = "exact",
) -> Partial:
    """The exact sums of all leaves over the rows (K, V) of a block. They are private data.

    Args:
      block: K (n, d) and V (n, d_v); blocks may have different n.
      domain, features, bins, clip, noise, budget: As in `build`.
    """
    K, V = block
    _check_rows(K, V, domain)
    bins, structures = num_bins(bins), Structures(domain, features, noise, budget)
    K, V = domain.enter(K, V, clip=clip)
    return structures.partial(K, V, bins=bins, clip=clip)


def _check_rows(K, V, domain: Domain) -> int:
    n = domain.check_memory(K, V)
    if np.ndim(K) != 2:
        raise ValueError(f"K has shape {np.shape(K)}: trees take (n, d), use the sketch for heads")
    return n


def _planned(
    structures: Structures, bins: int, copies: int, clip: bool, epsilon: float, delta: float
) -> tuple[node_noise.NodeNoise, PrivacyGuarantee]:
    """The noise of the nodes, and the guarantee; raises ValueError for arguments out of range."""
    domain, features, noise = structures.domain, structures.features, structures.noise
    epsilon, delta = _validate.check_epsilon(epsilon), _validate.check_delta(delta)
    node_noise.check_noise(noise, delta)
    copies = _validate.check_integer(copies, "copies")
    trees = (copies, len(structures.parts[0]), MOMENTS, 1 + domain.value_dim)
    size = 4 * math.prod(trees) * bins
    if size > _MAX_BYTES:
        raise ValueError(
            f"degree={features.degree} makes r = {features.num_features} features: trees of "
            f"{size / 2**30:.3g} GiB with {bins} bins and {copies} copies: use fewer bins or copies, or a "
            "lower degree"
        )
    nodes, event = structures.nodes(bins.bit_length() - 1, copies, epsilon, delta)
    check_size("tree nodes", [domain.key_bound, domain.value_norm, *jax.tree.leaves(nodes)])
    return nodes, PrivacyGuarantee(
        epsilon=epsilon,
        delta=delta,
        neighboring=REPLACE_ONE,
        unit="row of (K, V)",
        mechanism=f"{'×'.join(map(str, trees))} trees of {bins} bins with {noise.replace('_', ' ')} noise in "
        "every node but the root, any number of queries",
        assumptions=("the number of rows is public",)
        + (() if clip else ("data within the declared bounds",)),
        event=event,
    )
