"""Trees against brute force over records, their noise, and an audit that catches the paper's mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_attention_memory import BUDGET, EXACT, KEY
from dp_accounting.pld import common, privacy_loss_distribution

from dpx import audit
from dpx import cross_attention as trees
from dpx._numerics import wide_sums
from dpx.cross_attention.trees import node_noise, node_sums
from dpx.noise import Gaussian, TruncatedLaplace


def brute_force(x, w, y, power, bounds, bins):
    """Σ w|x − y|^p coordinate by coordinate, without the records of the query's own bin."""
    of_x, of_y = (np.minimum((rows / bounds * bins).astype(int), bins - 1) for rows in (x, y))
    apart = np.abs(x[None] - y[:, None]) ** power * (of_x[None] != of_y[:, None])
    return np.einsum("mnd,n->m", apart, w)


def records(n=40, dim=3, seed=0):
    rng = np.random.default_rng(seed)
    bounds = np.array([1.0, 2.0, 0.3])[:dim]
    x, y = rng.random((n, dim)) * bounds, rng.random((7, dim)) * bounds
    x[0] = y[0] = bounds  # the upper end belongs to the last bin
    x[1] = 0
    return *(a.astype(np.float32) for a in (x, rng.uniform(-2, 2, n), y)), bounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "power"),
    [("gaussian", 1), ("gaussian", 2), ("gaussian", 3), ("truncated_laplace", 3)],
)
def test_distances_without_noise_are_brute_force(noise, power):
    x, w, y, bounds = records()
    options = {"weight_bound": 2.0, "power": power, "noise": noise, "bins": 16, **EXACT}
    noiseless = {"rtol": 1e-3, "atol": 0.4 if noise == "gaussian" else 2e-3}
    got = trees.DPTreeHighDim.build(KEY, x, w, bound=bounds, **options).query(y)
    np.testing.assert_allclose(got, brute_force(x, w, y, power, bounds, 16), **noiseless)
    one = trees.DPTreeDistance.build(KEY, x[:, 1], w, bound=2.0, **options)
    want = brute_force(x[:, 1:2], w, y[:, 1:2], power, bounds[1:], 16)
    np.testing.assert_allclose(one.query(y[:, 1]), want, **noiseless)


@pytest.mark.slow
def test_sums_without_noise_are_brute_force():
    values = np.random.default_rng(0).uniform(-1, 1, 11)  # padded to 16
    tree = trees.DPTree.build(KEY, values, sensitivity=2.0, bound=3.0, **EXACT)
    padded = np.pad(values, (0, 5))
    for y in np.linspace(0, 3, 31):
        leaf = min(int(np.float32(y / 3) * 16), 15)
        left, right = tree.query(np.float32(y))
        assert left == pytest.approx(padded[:leaf].sum(), abs=3e-3)
        assert right == pytest.approx(padded[leaf + 1 :].sum(), abs=3e-3)


@pytest.mark.slow
def test_noise_of_a_query_is_one_node_for_each_level():
    """On empty trees, left + right is the sum of L noises, whatever the leaf."""
    nodes = node_noise.NodeNoise(Gaussian(1.0), np.ones(()))
    build = jax.vmap(lambda key: sum(node_sums.tabulate(key, jnp.zeros((32, 1)), nodes)))
    answers = build(jax.random.split(KEY, 2000))[..., 0]
    np.testing.assert_allclose(answers.var(0), 5.0, rtol=0.2)
    # Neighbouring leaves of one parent share all but the last level's node.
    assert np.corrcoef(answers[:, 0], answers[:, 1])[0, 1] == pytest.approx(0.8, abs=0.04)
    assert np.corrcoef(answers[:, 0], answers[:, 31])[0, 1] == pytest.approx(0.0, abs=0.08)


@pytest.mark.parametrize(("epsilon", "count"), [(0.01, 5000), (1.0, 17), (1.0, 5000), (20.0, 5000)])
def test_split_budget_composes_to_the_budget(epsilon, count):
    """By dp-accounting, for mechanisms that are (ε, δ)-DP and no better; their losses are ±ε."""
    each, delta = node_noise.split_budget(epsilon, 1e-6, count)
    losses = privacy_loss_distribution.from_privacy_parameters(
        common.DifferentialPrivacyParameters(each, delta), value_discretization_interval=each
    )
    assert losses.self_compose(count).get_delta_for_epsilon(epsilon) <= 1e-6


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 20.0, 1e4, 1e8])
@pytest.mark.parametrize("count", [1, 17, 5000])
def test_split_budget_is_no_less_than_basic_composition(epsilon, count):
    each, _ = node_noise.split_budget(epsilon, 1e-6, count)
    assert each >= epsilon / count * (1 - 1e-12)


def test_gaussian_noise_spends_exactly_the_budget():
    ranges = np.array([1.0, 0.5, 2.0])
    stds = node_noise.gaussian_stds(ranges, 2, 7, 3.0)
    assert (7 * 3.0**2 / stds**2).sum() == pytest.approx(1)
    worst = ranges[:, None] ** 2 * np.array([1, 2, 1])
    assert (worst**2 * stds**2).sum() < (worst**2 * 3.0**2 * 7 * 9).sum()


@pytest.mark.slow
def test_audit_accepts_the_tree_and_catches_a_released_root():
    """Two leaves, so one level below the root. A record flips its weight: every node above it moves by 2."""
    delta = 1e-2
    law = TruncatedLaplace.calibrate(2.0, *node_noise.split_budget(1.0, delta, 1))

    def audited(levels, delta):
        ratios = []
        for key, shift in enumerate((1.0, -1.0)):
            nodes = np.asarray(law.sample(jax.random.key(key), (100_000, levels)), float) + shift
            here, there = (np.asarray(law.log_density(nodes - s), float) for s in (1.0, -1.0))
            outside = np.isneginf(there)
            ratio = np.where(outside, np.inf, here - np.where(outside, 0, there)).sum(1)
            ratios.append(np.round(ratio, 3))  # the last digits would tell the shift
        return audit.epsilon_lower_bound(*ratios, delta, confidence=0.99).epsilon

    assert 0.8 < audited(1, delta) <= 1.0
    # The paper's tree gives each of log₂(2) = 1 levels ε/log₂(2) and releases two, the root among them.
    assert audited(2, 2 * delta) > 1.3


@pytest.mark.slow
@pytest.mark.parametrize("noise", node_noise.NOISES)
def test_audit_of_a_whole_distance_structure(noise):
    """A likelihood-ratio-like statistic over all that two-leaf trees release stays below the claim."""
    epsilon, delta = 1.0, 1e-2
    options = {"bound": 1.0, "weight_bound": 1.0, "bins": 2, "noise": noise}

    def release(key, w):
        weights = jnp.zeros(3).at[0].set(w)
        tree = trees.DPTreeDistance.build(
            key, np.ones(3), weights, epsilon=epsilon, delta=delta, **options
        )
        return tree.table[0, 0, :, 0]  # the three moments of the right leaf, seen from the left one

    stds = np.ones(3) if noise == "truncated_laplace" else 1 / np.sqrt([1.0, 2.0, 1.0])
    keys = jax.random.split(jax.random.key(5), (2, 40_000))
    direction = np.array([1, -1, 1]) / stds**2
    statistics = [
        np.asarray(jax.vmap(release, in_axes=(0, None))(k, w)) @ direction
        for k, w in zip(keys, (1.0, -1.0), strict=True)
    ]
    bound = audit.epsilon_lower_bound(*statistics, delta, confidence=0.99).epsilon
    assert 0.3 < bound <= epsilon


@pytest.mark.slow
def test_structures_are_pytrees_and_build_under_jit():
    x, w, y, bounds = records()
    options = {"bound": bounds, "weight_bound": 2.0, "bins": 16, **EXACT}
    eager = trees.DPTreeHighDim.build(KEY, x, w, **options)
    traced = jax.jit(lambda k, x, w: trees.DPTreeHighDim.build(k, x, w, **options))
    np.testing.assert_allclose(traced(KEY, x, w).query(y), eager.query(y), rtol=2e-4, atol=0.8)
    found = traced(KEY, x, w).guarantee
    (rounded,) = set(found.assumptions) - set(eager.guarantee.assumptions)
    assert "they have 32 bits" in rounded
    assert found == eager.guarantee.assuming(rounded)
    query = jax.jit(lambda tree, y: tree.query(y))
    np.testing.assert_allclose(query(eager, y), eager.query(y), rtol=1e-4, atol=1e-2)


@pytest.mark.slow
def test_one_record_never_moves_a_long_sum_by_more_than_the_sensitivity():
    """In 32 bits weights of −0.35 ulp would move a sum below 2¹³ by half an ulp each, one above by none."""
    n, head = 20_000, 2**13
    weights = np.where(np.arange(n) < head, 1, -0.35 * 2.0**-23 * head).astype(np.float32)
    options = {"bound": 1.0, "weight_bound": 1.0, "bins": 2, **EXACT}
    tables, sums = [], []
    for w in (1.0, 0.0):
        weights[head] = w
        key = KEY
        tree = trees.DPTreeDistance.build(key, np.full(n, 0.75), weights, **options)
        tables.append(np.asarray(tree.table, np.float64))
        sums.append(trees.DPTree.build(key, weights, sensitivity=2.0, **EXACT).left)
        assert tree.table.dtype == sums[-1].dtype == np.float32
    assert abs(tables[0] - tables[1])[..., 0, 0].max() == pytest.approx(1, abs=1e-3)
    # Leaves left of the changed one do not move, and all others move by its weight.
    assert set(np.round(np.asarray(sums[0] - sums[1], np.float64), 2)) == {0.0, 1.0}


def test_wide_sums_are_for_arrays_that_are_not_traced():
    seen = []

    def dtype(x):
        with wide_sums(x):
            seen.append((x + jnp.zeros(())).dtype)
        return x

    x = np.float32(1)
    for f in (dtype, jax.jit(dtype), jax.jit(lambda y: y + dtype(x))):
        f(x)
    assert seen == [np.float64, np.float32, np.float64]
    assert jnp.zeros(()).dtype == np.float32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bound": 0.9}, r"x\[0\] is outside"),
        ({"bound": None}, "bound"),
        ({"bound": [1.0, 1.0]}, r"bound has shape \(2,\)"),
        ({"weight_bound": 0.5}, r"weights\[\d+\] is outside"),
        ({"noise": "uniform"}, "noise='uniform'"),
        ({"power": 2.5}, "power"),
        ({"bins": np.nan}, "bins"),
        ({"weights": np.ones(3)}, "pass"),
    ],
)
def test_misuse_raises(wrong, message):
    x, w, _, bounds = records()
    good = {"weights": w, "bound": bounds, "weight_bound": 2.0, **BUDGET}
    with pytest.raises(ValueError, match=message):
        trees.DPTreeHighDim.build(KEY, x, **(good | wrong))


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["x", "weights"])
def test_record_that_is_not_finite_counts_as_zero_under_jit_and_is_named_without(value, where):
    x, w, y, bounds = records()
    options = {"bound": bounds, "weight_bound": 2.0, "bins": 16, **EXACT}
    build = lambda x, w: trees.DPTreeHighDim.build(KEY, x, w, **options)  # noqa: E731
    one = lambda x, w: trees.DPTreeDistance.build(  # noqa: E731
        KEY, x, w, bound=2.0, weight_bound=2.0, **EXACT
    )
    without = w.copy()
    without[3] = 0
    (x if where == "x" else w)[(3, 1) if where == "x" else 3] = value
    with pytest.raises(ValueError, match=rf"{where}\[3\] is outside"):
        build(x, w)
    clean = np.where(np.isfinite(x), x, 0)
    np.testing.assert_allclose(
        jax.jit(build)(x, w).query(y), build(clean, without).query(y), rtol=1e-3, atol=0.8
    )
    got, want = jax.jit(one)(x[:, 1], w), one(clean[:, 1], without)
    np.testing.assert_allclose(got.query(y[:, 1]), want.query(y[:, 1]), rtol=1e-3, atol=0.8)


@pytest.mark.slow
def test_records_beyond_the_bounds_are_clipped_under_jit():
    @jax.jit
    def build(x, w):
        options = {"bound": [1.0, 0.5], "weight_bound": 2.0, "bins": 4, **BUDGET}
        return trees.DPTreeHighDim.build(KEY, x, w, **options).table

    beyond = build(jnp.array([[-3.0, 0.9], [7.0, 0.2]]), jnp.array([5.0, -9.0]))
    clipped = build(jnp.array([[0.0, 0.5], [1.0, 0.2]]), jnp.array([2.0, -2.0]))
    np.testing.assert_array_equal(beyond, clipped)


@pytest.mark.slow
def test_sum_that_is_not_finite_counts_as_zero_under_jit_and_is_named_without():
    build = lambda values: trees.DPTree.build(  # noqa: E731
        KEY, values, sensitivity=2.0, **EXACT
    )
    with pytest.raises(ValueError, match=r"values\[1\] is not finite"):
        build(np.array([1.0, np.nan]))
    got = jax.jit(build)(np.array([1.0, np.nan, 2.0]))
    np.testing.assert_allclose(got.left, build(np.array([1.0, 0.0, 2.0])).left, atol=1e-3)


@pytest.mark.slow
def test_queries_out_of_bounds_raise_and_are_clipped_under_jit():
    x, w, y, bounds = records()
    options = {"weight_bound": 2.0, "bins": 16, **EXACT}
    tree = trees.DPTreeHighDim.build(KEY, x, w, bound=bounds, **options)
    one = trees.DPTreeDistance.build(KEY, x[:, 0], w, bound=1.0, **options)
    sums = trees.DPTree.build(KEY, w, sensitivity=4.0, bound=1.0, **EXACT)
    for value in (1.1, -0.1, np.nan):
        wrong = y.copy()
        wrong[2, 0] = value
        for query in (tree.query, one.query, sums.query):
            with pytest.raises(ValueError, match=r"y\[2\] is outside"):
                query(wrong if query == tree.query else wrong[:, 0])
        with pytest.raises(ValueError, match="y is outside"):
            sums.query(value)
    high = np.full_like(y, 10)
    np.testing.assert_allclose(
        jax.jit(tree.query)(high), jax.jit(tree.query)(bounds * np.ones_like(y)), rtol=1e-6
    )
    for wrong in (y[:, :2], np.float32(0)):
        with pytest.raises(ValueError, match=r"pass \(m, 3\)"):
            tree.query(wrong)
