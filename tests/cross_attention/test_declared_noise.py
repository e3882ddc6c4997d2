"""Noise of private memories and what they assume, from public numbers alone, without a release."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_attention_memory import BUDGET, KEY
from dp_accounting.pld import common, privacy_loss_distribution

import dpx
from dpx.cross_attention import Domain, Sketch, sketch, trees
from dpx.cross_attention.sketch import choice, sums
from dpx.cross_attention.trees import distances as distance_trees
from dpx.cross_attention.trees import leaf_sums, node_noise
from dpx.cross_attention.trees.structures import Structures
from dpx.noise import TruncatedLaplace
from dpx.privacy import ADD_OR_REMOVE_ONE, REPLACE_ONE

MULTIPLIER = dpx.gaussian_noise_multiplier(**BUDGET)
S = 2**18  # the norm of a factor, in units of the grid of sketches
LEAF = 2**24  # and that of a record's weights in trees


def domain(kind="box", relation=REPLACE_ONE, values="box", dim=2, value_dim=3):
    return Domain(kind, dim, value_dim, 1.0, 1.0, 2.0, 1.0, values, relation)


@pytest.mark.parametrize("heads", [1, 4])
def test_a_sketch_covers_the_rounding_of_both_factors(heads):
    features = choice.choose_features(domain(), degree=4)
    longest = [S + math.ceil(0.51 * math.sqrt(size)) for size in (features.num_features, 1 + 3)]
    # Two products of norm S² are √2·S² apart, and rounding moves each by no more than it makes it longer.
    replaced = math.sqrt(2) * S**2 + 2 * (math.prod(longest) - S**2)
    for relation, apart in ((REPLACE_ONE, replaced), (ADD_OR_REMOVE_ONE, math.prod(longest))):
        found = sums.whole_change(features, domain(relation=relation), heads)
        assert found == pytest.approx(math.sqrt(heads) * apart, rel=1e-14)


def test_a_sketch_has_the_same_noise_under_jit():
    """The squares of what a row moves in each head add up, also where sums are of floats."""
    known = domain()
    features = choice.choose_features(known, degree=2)
    shapes = (jax.ShapeDtypeStruct((4, 7, columns), jnp.float32) for columns in (2, 3))

    def build(K, V):
        return sketch.build(KEY, K, V, domain=known, features=features, clip=True, **BUDGET)

    made = jax.eval_shape(build, *shapes)
    largest = math.sqrt(2) * known.value_norm * features.norm(known.largest_logit)
    change = sums.whole_change(features, known, 4) * largest / S**2
    assert made.noise_std == pytest.approx(MULTIPLIER * change, rel=1e-12)


def moved(nodes, depth):
    """How far a level of every tree may move, of Gaussian nodes whose squares add up to 1."""
    return 1 / math.sqrt(depth * np.sum(1 / np.square(nodes.sensitivity)))


def structures(*noise_and_budget):
    """Three features of a memory with four columns."""
    known = domain()
    return Structures(known, trees.choose_features(known, degree=1), *noise_and_budget)


ROUNDING = 2 * 0.51 * math.hypot(2, 2 * math.sqrt(3)) / LEAF  # of one column, with Laplace noise


@pytest.mark.parametrize("copies", [1, 3])
def test_gaussian_trees_of_a_memory_cover_the_rounding_of_a_row(copies):
    nodes, _ = structures().nodes(5, copies, *BUDGET.values())
    norm = 2 * math.sqrt(3)
    rounding = 2 * 0.51 * math.sqrt(4) * math.hypot(norm, norm) / LEAF
    assert moved(nodes, 5) == pytest.approx(math.sqrt(copies) * (2 * norm + rounding), rel=1e-14)
    assert np.all(nodes.law.std == MULTIPLIER * nodes.sensitivity)


def test_truncated_laplace_trees_of_a_memory_cover_the_rounding_of_a_row():
    nodes, _ = structures("truncated_laplace").nodes(5, 1, *BUDGET.values())
    np.testing.assert_allclose(nodes.sensitivity, 5 * (2 * 2.0 + ROUNDING), rtol=1e-14)
    epsilon, _ = node_noise.split_budget(*BUDGET.values(), 5 * 3 * 3 * 4)
    np.testing.assert_allclose(nodes.law.scale, (2 * 2.0 + ROUNDING) / epsilon, rtol=1e-14)


def test_the_papers_trees_of_a_memory_have_their_parts_of_the_budget():
    """Four columns in two copies, structures of Σ w and three features, five levels and three moments."""
    nodes, _ = structures("truncated_laplace", "paper").nodes(5, 2, *BUDGET.values())
    first, others = node_noise.paper_budget(*BUDGET.values(), 3, 4 * 2)
    change = 2 * 2.0 + ROUNDING
    for feature, (epsilon, delta) in enumerate([first, others, others, others]):
        law = TruncatedLaplace.calibrate(change, epsilon / 15, delta / 15)
        np.testing.assert_allclose(nodes.law.scale[feature], law.scale, rtol=1e-12)
        np.testing.assert_allclose(nodes.law.bound[feature], law.bound, rtol=1e-12)
    np.testing.assert_allclose(nodes.sensitivity, 5 * change, rtol=1e-14)


def test_trees_of_distances_cover_the_rounding_of_a_record():
    nodes, guarantee = distance_trees._planned(np.ones(2), 16, 3.0, 2, "gaussian", *BUDGET.values())
    assert moved(nodes, 4) == pytest.approx(2 * 3.0 + 2 * 0.51 * 3.0 / LEAF, rel=1e-14)
    assert guarantee.assumptions == (
        "the number of records is public",
        "data within the declared bounds",
    )


@pytest.mark.slow
def test_sums_of_trees_say_how_long_a_record_is():
    """So many of them as would pass 64 bits are refused."""
    known = domain()
    features = choice.choose_features(known, degree=2)
    block = np.ones((1, 2)), np.full((1, 3), 2.0)
    memory = trees.statistic(block, domain=known, features=features, bins=4)
    about = {"bound": 1.0, "weight_bound": 2.0, "bins": 4}
    distances = distance_trees.DPTreeHighDim.statistic((block[0], np.full(1, 2.0)), **about)
    for total in (memory, distances):
        longest = np.linalg.norm(total.sums[0].astype(float))
        assert 0.2 * total.largest < longest <= total.largest


def test_weights_beyond_their_bound_count_as_zero():
    found = leaf_sums.leaf_sums(np.full(2, 0.3), np.array([[1.0], [1.001]]), 1.0, 1, 2)
    assert found[:, :, 0].tolist() == [[LEAF, np.rint(0.3 * LEAF)], [0, 0]]


@pytest.mark.parametrize(
    ("epsilon", "features", "copies"),
    [
        *((epsilon, *counts) for epsilon in (0.1, 1.0) for counts in ((1, 1), (4, 3), (60, 7))),
        (100.0, 60, 7),
    ],
)
def test_parts_of_the_papers_budget_compose_to_it(epsilon, features, copies):
    """By dp-accounting, for the least private mechanisms of the stated guarantees."""
    parts = node_noise.paper_budget(epsilon, 1e-5, features, copies)
    interval = parts[1][0] / math.ceil(parts[1][0] / (epsilon / 3000))

    def losses(part):
        return privacy_loss_distribution.from_privacy_parameters(
            common.DifferentialPrivacyParameters(*part), value_discretization_interval=interval
        )

    once = losses(parts[0]).compose(losses(parts[1]).self_compose(features))
    delta = once.self_compose(copies).get_delta_for_epsilon(epsilon * (1 + 1e-2))
    assert delta <= 1e-5 * (1 + 1e-9)
    # In Remark 4.2 half of δ is the slack of advanced composition, and goes to no part.
    assert copies * (parts[0][1] + features * parts[1][1]) <= 1e-5 / 2 * (1 + 1e-9)


@pytest.mark.quick_cases(
    "NeighboringRelation.ADD_OR_REMOVE_ONE-False", "NeighboringRelation.ADD_OR_REMOVE_ONE-True"
)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("relation", [REPLACE_ONE, ADD_OR_REMOVE_ONE])
def test_a_memory_says_what_it_assumes(clip, relation):
    known = domain(relation=relation)
    features = choice.choose_features(known, degree=2)
    words = ("the number of rows is public",) * (relation is REPLACE_ONE)
    words += ("data within the declared bounds",) * (not clip)
    about = {"domain": known, "features": features, "clip": clip}
    K, V = np.zeros((9, 2)), np.zeros((9, 3))
    made = sketch.build(KEY, K, V, **about, **BUDGET)
    assert made.guarantee.assumptions == words
    assert made.num_records == (9 if relation is REPLACE_ONE else None)
    if clip:
        traced = jax.jit(lambda K: sketch.build(KEY, K, V, **about, **BUDGET))(K)
        assert traced.guarantee.assumptions[:-1] == words  # and that sums are exact
    if relation is REPLACE_ONE:
        made = trees.build(KEY, K, V, **about, **BUDGET)
        assert made.guarantee.assumptions == words


def test_values_that_add_up_are_no_simplex_by_that():
    known = domain(values="simplex", value_dim=2)
    with pytest.raises(ValueError, match="V row 1 is outside the vectors of numbers ≥ 0"):
        known.enter(np.zeros((2, 2)), np.array([[0.5, 1.5], [3.0, -1.0]]), clip=False)


def test_means_of_a_private_number_of_rows_are_over_one_at_least():
    known = domain(relation=ADD_OR_REMOVE_ONE)
    features = choice.choose_features(known, degree=0)
    empty = jnp.array([[0.0, 1.0, 2.0, 3.0]])
    made = Sketch(empty, features, known, None, 1.0, None)  # type: ignore[arg-type]
    np.testing.assert_array_equal(made.means, empty)


def test_features_share_two_thirds_where_advanced_composition_brings_more():
    (epsilon, delta), others = node_noise.paper_budget(6000.0, 1e-5, 10_000, 1)
    assert epsilon + 10_000 * others[0] == pytest.approx(6000.0)
    assert delta + 10_000 * others[1] <= 1e-5
