"""Numbers in 16 bits cost, and need, what the same numbers cost and need in 64; and so are results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

import dpx
from dpx import audit, gram, ngram, noise, noisy_head
from dpx.cross_attention import DPTreeHighDim
from dpx.cross_attention.trees.node_noise import split_budget
from dpx.data.histories import Histories
from dpx.gram.accounting import Columns
from dpx.recommend import popularity, transitions

KEY = jax.random.key(0)
BUDGET = {"epsilon": 1.3, "delta": 1e-3}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 20))
HISTORIES = Histories([RNG.integers(0, 9, size=6) for _ in range(20)], 9)
TOKENS, MASK = RNG.integers(0, 4, size=(20, 6)), np.ones((20, 6), bool)
POINTS, WEIGHTS = RNG.random((6, 2)) / 2, RNG.random(6) / 2


def release(number, **bounds):
    numbers = {k: v if isinstance(v, str) else number(v) for k, v in bounds.items()}
    return gram.release(KEY, X, **numbers, **BUDGET)


def traced(number):
    bound = number(1.7)  # outside of the program, in which it would be traced
    program = jax.jit(lambda X: gram.release(KEY, X, column_bound=bound, **BUDGET).matrix)
    return program(X.astype(np.float32))


def gaussian(number):
    multipliers = [
        dpx.gaussian_noise_multiplier(number(e), number(1e-3), compositions=2) for e in (0.7, 5.0)
    ]
    return multipliers, dpx.gaussian_epsilon(number(0.7), 1e-5)


def sampled(accountant):
    def epsilon(number):
        settings = {"sampling_probability": number(0.01), "steps": 10, "accountant": accountant}
        return dpx.dpsgd_epsilon(number(1.3), 1e-5, **settings)

    return epsilon


def ledger(number):
    found = []
    run = SelfComposedDpEvent(PoissonSampledDpEvent(number(0.01), GaussianDpEvent(number(1.3))), 10)
    for event in (GaussianDpEvent(number(0.7)), run):
        about = {"neighboring": "add_or_remove_one", "unit": "record", "mechanism": "noise"}
        for spent in (event, dpx.PrivacyGuarantee(1.0, 1e-5, **about, event=event)):
            found.append(dpx.Ledger().spend(spent, "a release").guarantee(1e-5).epsilon)
    return found


def laws(number):
    about = {"neighboring": "replace_one", "unit": "row"}
    narrow = noise.TruncatedLaplace.calibrate(number(0.7), number(0.3), number(1e-3))
    return (
        noise.Laplace(number(0.3)).guarantee(number(0.7), **about).epsilon,
        noise.Gaussian(number(0.3)).guarantee(number(0.7), 1e-5, **about).epsilon,
        (narrow.scale, narrow.bound),
        # In 16 bits the noise would not reach as far as its guarantee says.
        noise.TruncatedLaplace(number(0.7), 1.903).sample(KEY, (1000,)),
    )


def sensitivities(number):
    hyper = noisy_head.HyperParameters(number(1.1), number(0.7), number(2.3))
    descent = noisy_head.Descent(
        hyper, regularization=number(0.3), step_size=number(0.1), steps=3, accounting="zcdp"
    )
    return (
        Columns(number(1.1), number(0.7)).sensitivity,
        Columns(number(1.1), None, "add_or_remove_one").sensitivity,
        descent.change,
        descent.calibrate(number(0.7), number(1e-3))[0],
        noisy_head.gradient_sensitivity(hyper),
        split_budget(number(0.7), number(1e-3), 7),
    )


def samples(number):
    bounds = {"column_bound": 0.7, "max_column_change": 0.003, "n": 3}
    return [
        gram.max_samples(**BUDGET, eta=number(eta), **bounds, calibration=calibration)
        for eta in (0.37, 0.61, 0.83)
        for calibration in ("exact", "paper")
    ]


def integers(number):
    sizes = {"sensitivity": number(0.7), "unit": number(0.3), "noise_multiplier": 1.3}
    recorded = audit.record(
        lambda counts: noise.release_integers(KEY, np.array(counts), label="counts", **sizes),
        list(range(5)),
    )
    return recorded.releases[0].noisy[0], recorded.releases[0].unit[0]


def recommended(number):
    counted = popularity.fit(
        KEY, HISTORIES, l2_clip_norm=number(0.7), age_decay=number(0.9), **BUDGET
    )
    moved = transitions.fit(
        KEY,
        HISTORIES,
        num_kept=number(5),
        rounds=number(2),
        max_gap=number(3),
        gap_decay=number(0.87),
        age_decay=number(0.93),
        order_weight=number(0.71),
        position_weight=number(0.13),
        popularity_age_decay=number(0.83),
        popularity_budget_fraction=number(0.13),
        **BUDGET,
    )
    return counted[:2], moved.estimate, moved.standard_error, moved.log_popularity


def counted(number):
    table = {"order": 2, "vocab_size": 4, "start": 0, "unit": "row"}
    return ngram.fit(KEY, TOKENS, MASK, l2_clip_norm=number(1.7), **table, **BUDGET)[0]


def distances(number):
    about = {"weight_bound": number(0.7), "bound": number(0.9), "bins": 4}
    return DPTreeHighDim.build(KEY, POINTS, WEIGHTS, **about, **BUDGET).table


PROGRAMS = {
    "Gaussian": gaussian,
    "DP-SGD": sampled("pld"),
    "DP-SGD, RDP": sampled("rdp"),
    "ledger": ledger,
    "laws": laws,
    "sensitivities": sensitivities,
    "Gram": lambda number: release(number, column_bound=1.7).matrix,
    "Gram, moved": lambda number: (
        release(number, column_bound=1.7, max_column_change=0.3).noise_std
    ),
    "Gram, removed": lambda number: (
        release(number, column_bound=1.7, neighboring="add_or_remove_one").noise_std
    ),
    "Gram, traced": traced,
    "samples": samples,
    "integers": integers,
    "recommenders": recommended,
    "n-grams": counted,
    "distances": distances,
}


@pytest.mark.quick_cases(
    *(f"{name}-float16" for name in ("Gaussian", "DP-SGD, RDP", "ledger", "sensitivities")),
    *(f"{name}-bfloat16" for name in ("laws", "Gram", "samples", "recommenders", "n-grams")),
)
@pytest.mark.parametrize("narrow", [np.float16, jnp.bfloat16, np.float32])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_follows_from_narrow_numbers_follows_from_wide_ones(name, narrow):
    found, wide = (PROGRAMS[name](n) for n in (narrow, lambda number: float(narrow(number))))
    # NumPy compares in 16 bits.
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.array(a, float), b), found, wide)


def test_a_law_of_several_sizes_has_no_guarantee():
    about = {"neighboring": "replace_one", "unit": "row"}
    with pytest.raises(ValueError, match="must be a number"):
        noise.Laplace(np.array([1.0, 0.1])).guarantee(1.0, **about)
