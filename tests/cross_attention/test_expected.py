"""What is said of a private memory before it is built, from public numbers: its error, features and size."""

import re
import warnings

import jax
import numpy as np
import pytest
from cross_attention_memory import BOX, BUDGET, KEY

import dpx.attention
from dpx import cross_attention
from dpx.cross_attention import MemoryWarning, baselines
from dpx.cross_attention.sketch import expected
from dpx.privacy import gaussian_epsilon, gaussian_noise_multiplier

LABELS = {**BOX, "domain": "ball", "value_domain": "simplex"}
AUTO = {"features": "auto"}
PRIVATE = {"neighboring": "add_or_remove_one"}


def build(K, V, **options):
    return cross_attention.build(KEY, K, V, clip=True, **BUDGET | options)


def expect(*sizes, **options):
    return cross_attention.expected_error(*sizes, **BUDGET | options)


def model(n, dim, value_dim, seed=0, **about):
    """A memory and queries as the model has them, written down anew."""
    rng = np.random.default_rng(seed)
    ball = about.get("domain", "box") == "ball"
    draw = rng.normal if ball else rng.uniform
    K, Q = draw(size=(n, dim)), draw(size=(100, dim))
    if ball:
        K, Q = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (K, Q))
    centred = K * dim**0.5 if ball else 2 * K - 1
    if about.get("value_domain") == "simplex":
        anchors = rng.normal(size=(value_dim, dim))
        anchors /= np.linalg.norm(anchors, axis=1, keepdims=True)
        V = np.eye(value_dim)[(centred @ anchors.T).argmax(1)]
    else:
        V = np.clip(np.tile(centred, (1, value_dim // dim + 1))[:, :value_dim], -1, 1)
        if about.get("value_domain") == "ball":
            V = centred[:, np.arange(value_dim) % dim]
            V /= np.linalg.norm(V, axis=1, keepdims=True)
    return K, V, Q


def labelled(n, dim, labels, *, spread=1.0, queries=800, seed=0):
    """Unit vectors around the centre of their label: keys, values, queries, and the queries' labels."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(labels, dim))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    own = rng.integers(labels, size=n + queries)
    x = centres[own] + spread / dim**0.5 * rng.normal(size=(n + queries, dim))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x[:n], np.eye(labels)[own[:n]], x[n:], own[n:]


# ---------------------------------------------------------------------------------------------------------
# Errors

CASES = {
    "box": (20_000, 2, 3, {}),
    "ball": (5000, 6, 4, {"domain": "ball", "value_domain": "ball", "scale": 0.4, "degree": 4}),
    "a bias that is larger than the noise": (20_000, 3, 3, {"scale": 0.3, "degree": 2}),
    "more noise than attention": (200, 4, 4, {"scale": 0.5}),
    "labels that come and go": (3000, 12, 5, {**LABELS, **PRIVATE, "scale": 0.5, "degree": 2}),
    "random features": (
        3000, 8, 3, {"domain": "ball", "scale": 0.7, "features": "random", "num_features": 256}
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::dpx.cross_attention.MemoryWarning")
def test_the_expected_error_is_the_measured_one(name):
    """Within a factor 1.3, of memories that the test draws itself, as the model says."""
    *sizes, about = CASES[name]
    found = expect(*sizes, **BOX | about)
    errors, means = [], []
    for seed in range(4):
        K, V, Q = model(*sizes, seed, **about)
        key = jax.random.fold_in(KEY, seed)
        built = cross_attention.build(key, K, V, clip=True, **BUDGET, **BOX | about)
        exact = dpx.attention.dot_product_attention(Q, K, V, scale=1 / built.domain.scale)
        errors.append(np.abs(built.query(Q) - exact).mean())
        kind = about.get("value_domain", "box")
        mean = baselines.mean_of_values(key, V, value_bound=1.0, value_domain=kind, **BUDGET)
        means.append(np.abs(mean.values - exact).mean())
    assert found.error / 1.3 < np.mean(errors) < 1.3 * found.error
    if "neighboring" not in about:  # the baseline replaces a row
        assert found.mean_error / 1.3 < np.mean(means) < 1.3 * found.mean_error
    assert found.num_features == built.features.num_features


def test_the_bias_is_the_error_without_noise():
    about = (10**9, 3, 3), {**BOX, "scale": 0.3, "degree": 2}
    found = expect(*about[0], **about[1], epsilon=1e8)
    assert found.error == pytest.approx(found.bias, rel=1e-3)
    assert expect(*about[0], **about[1]).bias == found.bias


def test_heads_share_the_budget():
    """Four heads have the noise of one with twice the noise multiplier."""
    about = {"n": 1000, "dim": 3, "value_dim": 2, **BOX, "delta": 1e-5, "degree": 2}
    less = gaussian_epsilon(2 * gaussian_noise_multiplier(1.0, 1e-5), 1e-5)
    four, alone = expect(**about, num_heads=4), expect(**about, epsilon=less)
    assert four.error == pytest.approx(alone.error, rel=1e-6)
    assert four.error > 1.5 * expect(**about).error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dpx.cross_attention.MemoryWarning")
def test_what_is_told_apart_is_what_was_expected():
    """Within 0.04, of clusters that the test draws itself."""
    about = {**LABELS, "degree": 2, "scale": 0.5}
    for n in (200, 1000):
        shares = []
        for seed in range(4):
            for spread in (1.0, 2.0):
                K, V, Q, own = labelled(n, 16, 5, spread=spread, seed=seed)
                key = jax.random.fold_in(KEY, seed)
                built = cross_attention.build(key, K, V, clip=True, **BUDGET, **about)
                answers = np.asarray(built.query(Q))
                for row, label in zip(answers, own, strict=True):
                    others = np.delete(row, label)
                    shares.append(np.mean((row[label] > others) + (row[label] == others) / 2))
        found = expect(n, 16, 5, **about).told_apart
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
        return expect(n, 4, value_dim, **LABELS | about | {"scale": 0.5} | options).told_apart

    assert 0.44 < told_apart(30, epsilon=1e-6, degree=4) < 0.56
    assert 0.44 < told_apart(10**6, degree=0) < 0.56
    only_label = value_dim == 1 and about["value_domain"] == "simplex"
    sharp = told_apart(10**6, epsilon=1e6, scale=0.2, degree=10)
    assert sharp == 0.5 if only_label else sharp > 0.57


# ---------------------------------------------------------------------------------------------------------
# Choices


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dpx.cross_attention.MemoryWarning")
@pytest.mark.parametrize("spread", [1.0, 1.5])
def test_a_memory_of_few_documents_classifies(spread):
    """The least squared error is that of a constant here, which answers all queries with one label."""
    K, V, Q, own = labelled(1000, 64, 20, spread=spread)

    def accuracy(**options):
        answers = build(K, V, delta=1e-5, **LABELS, **options).query(Q)
        return (np.asarray(answers).argmax(1) == own).mean()

    by_hand = max(accuracy(degree=2, scale=scale) for scale in (0.25, 0.5, 1.0, 2.0))
    assert accuracy(degree=0) < 0.1
    assert accuracy(**AUTO) > max(0.3, 0.85 * by_hand)


@pytest.mark.slow
def test_features_are_chosen_by_what_is_told_apart_and_the_expected_error():
    """Higher degrees for larger budgets, the mean for none, and never a worse choice than by hand."""

    def chosen(epsilon, n=5000, scale=1 / 3, **features):
        return expect(n, 16, 5, **LABELS, epsilon=epsilon, scale=scale, **features)

    auto = {epsilon: chosen(epsilon, **AUTO) for epsilon in (1e-4, 1.0, 30.0)}
    degrees = [found.degree for found in auto.values()]
    assert degrees[0] == 0
    assert degrees == sorted(degrees)
    assert degrees[2] >= 4
    for epsilon, found in auto.items():
        by_hand = [chosen(epsilon, degree=degree) for degree in (0, 2, 4)]
        least = 0.5 + 0.9 * (max(other.told_apart for other in by_hand) - 0.5)
        assert found.told_apart >= least or found.degree == 0
        as_good = [other for other in by_hand if other.told_apart >= max(least, found.told_apart)]
        assert found.error <= min((other.error for other in as_good), default=np.inf)
    temperatures = [chosen(1.0, n, None, **AUTO).scale for n in (1000, 10**6)]
    assert temperatures[0] > temperatures[1]  # more rows bear more detail


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dpx.cross_attention.MemoryWarning")
def test_the_choice_looks_at_no_key_and_no_value():
    """Memories of one shape get one choice, whatever they hold: the one that is expected."""
    rng = np.random.default_rng(0)
    spread, V = rng.normal(size=(60, 3)), np.eye(3)[rng.integers(3, size=60)]
    memories = [(spread, V), (np.zeros((60, 3)), V), (np.full((60, 3), np.nan), np.ones((60, 3)))]
    first, *others = [build(K, V, **LABELS, **AUTO) for K, V in memories]
    for other in others:
        assert other.domain == first.domain
        assert jax.tree.structure(other.features) == jax.tree.structure(first.features)
        assert other.moments.shape == first.moments.shape
    shaped = jax.eval_shape(lambda K, V: build(K, V, **LABELS, **AUTO), spread, V)
    assert shaped.domain == first.domain
    chosen = expect(60, 3, 3, **AUTO, **LABELS)
    assert chosen.scale == first.domain.scale
    assert chosen.num_features == first.features.num_features


@pytest.mark.slow
def test_the_number_of_rows_decides_nothing_where_it_is_private():
    found = []
    for n in (0, 3, 3000):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            options = {**LABELS, **AUTO, **PRIVATE, "expected_records": 500}
            built = build(np.zeros((n, 2)), np.eye(3)[[1] * n], **options)
        messages = [str(warning.message) for warning in said]
        found.append((built.domain, jax.tree.structure(built), built.moments.shape, messages))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_one_label_alone_is_no_error():
    found = expect(50, 2, 1, **LABELS, **AUTO)
    assert (found.error, found.mean_error, found.told_apart) == pytest.approx((0, 0, 0.5))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(PRIVATE, "expected_records"), ({"degree": 2}, "degree=2 must be left out")],
)
def test_what_a_choice_does_not_go_with_is_named(wrong, message):
    K, V, _ = model(20, 3, 3, **LABELS)
    with pytest.raises(ValueError, match=message):
        build(K, V, **LABELS, **AUTO, **wrong)


# ---------------------------------------------------------------------------------------------------------
# Warnings

BEATEN = "where the private mean of V errs by"
CONSTANT = r"degree=0 is a constant: .* errs by {0.error:.3g} .*55% of cases, here from 100 rows"
RANKS = r"in {0.told_apart:.0%} of cases \(by chance in 50 %\): read them as ranks"
SAID = {
    "a constant": ((100, 4, 3), {**LABELS, "epsilon": 1e-3, **AUTO}, CONSTANT),
    "a constant by hand": ((100, 4, 3), {**LABELS, "epsilon": 1e-3, "degree": 0}, CONSTANT),
    "ranks": ((1000, 64, 20), {**LABELS, "degree": 2, "scale": 0.5}, RANKS),
    "equal weights": ((1000, 16, 3), LABELS, r"between e\^±0\.062 .*use scale=√d = 4 or less"),
    "sharper": ((1000, 16, 3), {**LABELS, "scale": 1.0, "degree": 2, "epsilon": 10.0}, None),
    "few rows": ((30, 4, 4), BOX, BEATEN),
    "many rows": ((30_000, 4, 4), BOX, None),
    "few rows, their number private": ((5, 4, 4), {**BOX, **PRIVATE}, None),
    "few rows expected": ((5, 4, 4), {**BOX, **PRIVATE, "expected_records": 30}, BEATEN),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_what_a_memory_is_worth_is_said_before_it_is_built(name):
    """With the numbers of `expected_error`."""
    sizes, options, message = SAID[name]
    K, V, *_ = labelled(*sizes) if "domain" in options else model(*sizes)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        build(K, V, **options)
    said = [str(each.message) for each in seen if each.category is MemoryWarning]
    if message is None:
        assert not said
    elif "{" in message:
        message = message.format(expect(*sizes, **options))
    assert message is None or any(re.search(message, each) for each in said)


def test_a_memory_that_ranks_may_err_more_than_the_mean():
    found = expect(1000, 64, 20, **LABELS, degree=2, scale=0.5)
    assert found.told_apart > 0.7
    assert found.error > found.mean_error


@pytest.mark.parametrize(("error", "warns"), [(1.05, False), (1.2, True)])
def test_a_memory_that_the_mean_would_beat_is_announced(error, warns, monkeypatch):
    found = expected.ExpectedError(error, 0.0, 1.0, 0.9, "taylor", 2, 6, 1.0, 8)
    monkeypatch.setattr(expected, "simulated", lambda *_: found)
    domain = cross_attention.Domain.of_widths(2, 3, **BOX)
    features = cross_attention.PolynomialFeatures(2, 2, 2.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        expected.warn_before(domain, features, 100, 1.0, 1, None)
    assert [each.category for each in seen] == [MemoryWarning] * warns


@pytest.mark.slow
def test_the_memory_that_it_takes_is_said_or_refused(monkeypatch):
    K, V, _ = model(30, 16, 2, domain="ball")
    about = {**BOX, "domain": "ball", "epsilon": 1e8, "scale": 9.0, "degree": 2}
    with pytest.raises(ValueError, match=r"5311735 features|beyond 4194304"):
        build(K, V, **about | {"scale": 0.4, "degree": 10})
    monkeypatch.setattr(expected, "_LARGE_BYTES", 10**5)
    with pytest.warns(MemoryWarning, match="153 features of 3 sums take"):
        build(K, V, **about)
    monkeypatch.setattr(expected, "_MAX_BYTES", 10**5)
    with pytest.raises(ValueError, match="MiB, more than"):
        build(K, V, **about)
