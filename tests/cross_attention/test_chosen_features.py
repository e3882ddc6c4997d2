"""What `features="auto"` chooses, and what it may look at: public numbers, never keys or values."""

import warnings

import jax
import numpy as np
import pytest
from cross_attention_memory import KEY

from dpx import cross_attention
from dpx.cross_attention import MemoryWarning

LABELS = {"key_bound": 1.0, "value_bound": 1.0, "domain": "ball", "value_domain": "simplex"}
BUDGET = {"epsilon": 1.0, "delta": 1e-5}


def labelled(n, dim, labels, *, spread, queries=800, seed=0):
    """Unit vectors around the centre of their label: keys, values, queries, and the queries' labels."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(labels, dim))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    own = rng.integers(labels, size=n + queries)
    x = centres[own] + spread / dim**0.5 * rng.normal(size=(n + queries, dim))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x[:n], np.eye(labels)[own[:n]], x[n:], own[n:]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dpx.cross_attention.MemoryWarning")
@pytest.mark.parametrize("spread", [1.0, 1.5])
def test_a_memory_of_few_documents_classifies(spread):
    """The least squared error is that of a constant here, which answers all queries with one label."""
    K, V, Q, own = labelled(1000, 64, 20, spread=spread)

    def accuracy(**options):
        built = cross_attention.build(KEY, K, V, clip=True, **LABELS, **BUDGET, **options)
        return (np.asarray(built.query(Q)).argmax(1) == own).mean()

    chosen = accuracy(features="auto")
    by_hand = max(accuracy(degree=2, scale=scale) for scale in (0.25, 0.5, 1.0, 2.0))
    assert accuracy(degree=0) < 0.1
    assert chosen > max(0.3, 0.85 * by_hand)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dpx.cross_attention.MemoryWarning")
def test_what_is_told_apart_is_what_was_expected():
    """Within 0.04, of clusters that the test draws itself."""
    about = {"degree": 2, "scale": 0.5}
    for n in (200, 1000):
        found = cross_attention.expected_error(n, 16, 5, **LABELS, **BUDGET, **about).told_apart
        shares = []
        for seed in range(4):
            for spread in (1.0, 2.0):
                K, V, Q, own = labelled(n, 16, 5, spread=spread, seed=seed)
                key = jax.random.fold_in(KEY, seed)
                built = cross_attention.build(key, K, V, clip=True, **LABELS, **BUDGET, **about)
                answers = np.asarray(built.query(Q))
                for row, label in zip(answers, own, strict=True):
                    others = np.delete(row, label)
                    shares.append(np.mean((row[label] > others) + (row[label] == others) / 2))
        assert found == pytest.approx(np.mean(shares), abs=0.04)


@pytest.mark.quick_cases("1-box", "4-simplex")
@pytest.mark.parametrize(
    "about",
    [
        {"value_domain": "simplex"},
        {"value_domain": "ball"},
        {"value_domain": "box"},
        {"value_domain": "box", "domain": "box"},
    ],
    ids=lambda about: "-".join(about.values()),
)
@pytest.mark.parametrize("value_dim", [1, 4])
def test_values_are_told_apart_without_noise_and_by_a_constant_never(about, value_dim):
    """But for one label alone, which there is no other to tell from."""

    def told_apart(n, **options):
        sizes, options = (n, 4, value_dim), LABELS | about | {"scale": 0.5, "delta": 1e-5} | options
        return cross_attention.expected_error(*sizes, **options).told_apart

    assert 0.44 < told_apart(30, epsilon=1e-6, degree=4) < 0.56
    assert 0.44 < told_apart(10**6, epsilon=1.0, degree=0) < 0.56
    only_label = value_dim == 1 and about["value_domain"] == "simplex"
    sharp = told_apart(10**6, epsilon=1e6, scale=0.2, degree=10)
    assert sharp == 0.5 if only_label else sharp > 0.57


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dpx.cross_attention.MemoryWarning")
def test_the_choice_looks_at_no_key_and_no_value():
    """Memories of one shape get one choice, whatever they hold, and one that nothing could be read from."""
    rng = np.random.default_rng(0)
    V = np.eye(3)[rng.integers(3, size=60)]
    options = LABELS | {"features": "auto", "clip": True}

    def build(K, V):
        return cross_attention.build(KEY, K, V, **options, **BUDGET)

    spread = rng.normal(size=(60, 3))
    memories = [(spread, V), (np.zeros((60, 3)), V), (np.full((60, 3), np.nan), np.ones((60, 3)))]
    first, *others = [build(K, V) for K, V in memories]
    for other in others:
        assert other.domain == first.domain
        assert jax.tree.structure(other.features) == jax.tree.structure(first.features)
        assert other.moments.shape == first.moments.shape
    assert jax.eval_shape(build, spread, V).domain == first.domain
    chosen = cross_attention.expected_error(60, 3, 3, features="auto", **LABELS, **BUDGET)
    assert (chosen.scale, chosen.degree) == (first.domain.scale, first.features.degree)


@pytest.mark.slow
def test_the_number_of_rows_decides_nothing_where_it_is_private():
    options = LABELS | {"features": "auto", "clip": True, "neighboring": "add_or_remove_one"}
    found = []
    for n in (0, 3, 3000):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            built = cross_attention.build(
                KEY, np.zeros((n, 2)), np.eye(3)[[1] * n], expected_records=500, **options, **BUDGET
            )
        messages = [str(warning.message) for warning in said]
        found.append((built.domain, jax.tree.structure(built), built.moments.shape, messages))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_one_label_alone_is_no_error():
    found = cross_attention.expected_error(50, 2, 1, **LABELS, **BUDGET, features="auto")
    assert (found.error, found.mean_error, found.told_apart) == pytest.approx((0, 0, 0.5))


@pytest.mark.slow
def test_a_constant_is_said_with_its_numbers():
    K, V, _, _ = labelled(100, 4, 3, spread=1.0, queries=1)
    tiny = {"epsilon": 1e-3, "delta": 1e-5}
    found = cross_attention.expected_error(100, 4, 3, **LABELS, **tiny, features="auto")
    assert found.degree == 0
    message = (
        rf"degree=0 is a constant: .* errs by {found.error:.3g} .*55% of cases, here from 100 rows"
    )
    for chosen in ({"features": "auto"}, {"degree": 0, "scale": found.scale}):
        with pytest.warns(MemoryWarning, match=message):
            cross_attention.build(KEY, K, V, clip=True, **LABELS, **tiny, **chosen)


@pytest.mark.slow
def test_what_errs_more_than_the_mean_says_whether_it_ranks():
    K, V, _, _ = labelled(1000, 64, 20, spread=1.0, queries=1)
    found = cross_attention.expected_error(1000, 64, 20, **LABELS, **BUDGET, degree=2, scale=0.5)
    assert found.told_apart > 0.7
    assert found.error > found.mean_error
    message = rf"in {found.told_apart:.0%} of cases \(by chance in 50 %\): read them as ranks"
    with pytest.warns(MemoryWarning, match=message):
        cross_attention.build(KEY, K, V, clip=True, degree=2, scale=0.5, **LABELS, **BUDGET)


@pytest.mark.slow
def test_equal_weights_are_said():
    """Of keys in a ball the default scale d makes them."""
    K, V, _, _ = labelled(1000, 16, 3, spread=1.0, queries=1)
    with pytest.warns(MemoryWarning, match=r"between e\^±0\.062 .*use scale=√d = 4 or less"):
        cross_attention.build(KEY, K, V, clip=True, **LABELS, **BUDGET)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemoryWarning)
        cross_attention.build(
            KEY, K, V, clip=True, scale=1.0, degree=2, **LABELS, epsilon=10.0, delta=1e-5
        )
