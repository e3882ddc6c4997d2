"""Wrong calls of the public surface: each is named in a ValueError before any noise is drawn.

A case is a function, an argument and a value that it must not take. The calls that the cases change are
right: the last tests make them all.
"""

import dataclasses
import functools
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)

import dpx
from dpx import (
    cross_attention,
    gram,
    ngram,
    noise,
    noisy_head,
    privacy,
    reattention,
)
from dpx.cross_attention import baselines
from dpx.cross_attention.features import PolynomialFeatures
from dpx.data import Histories, synthetic_histories
from dpx.launch import records, run
from dpx.recommend import (
    item_gram,
    popularity,
    transitions,
)
from dpx.training import Poisson

KEY = jax.random.key(0)
NO_NUMBERS = ("1", None, float("nan"), 1j, True, [1.0])
# What an argument refuses beside what is no number.
POSITIVE = (0, -1, float("inf"))
NOT_NEGATIVE = (-1, float("inf"))
NOISE = (-1,)
COUNT = (0, -1, float("inf"), 1.5)
INDEX = (-1, float("inf"), 1.5)
EPSILON = (0, -1, float("inf"), 1e9)
DELTA = (0, -1, 1, float("inf"))
SHARE = (0, -0.1, 1, float("inf"))
PROBABILITY = (0, -0.1, 1.1, float("inf"))
WEIGHT = (-0.1, 1.1, float("inf"))
BUDGET = {"epsilon": EPSILON, "delta": DELTA}


@dataclasses.dataclass(frozen=True)
class Call:
    """A right call, and what each of its arguments refuses.

    An argument may be None where it is in the right call, or in `optional`.
    """

    function: Callable
    right: dict[str, Any]
    refused: dict[str, tuple]
    optional: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()  # arguments that may be arrays, or trees of numbers

    def __call__(self, **changes):
        return self.function(**(self.right | changes))


HISTORIES = Histories(tuple(np.array([0, 1, 2, 3])[: 2 + i % 3] for i in range(6)), 4)
FEATURES = noisy_head.Features(np.ones((4, 2)), np.ones((4, 2)), np.ones(4))
HYPER = (1.0, 1.0, 1.0)
K, V, Q = np.full((5, 2), 0.5), np.zeros((5, 1)), np.full((2, 2), 0.5)
TOKENS = np.array([[0, 1, 1], [1, 0, 1]])
WITHIN = {"epsilon": 1.0, "delta": 1e-5}
SAMPLED = {"sampling_probability": 0.5, "steps": 2}
CUT = {"num_examples": 8, "max_batch_size": 5}  # of samples that are cut off
# None too, of the two that go with each other.
REFUSED_STEPS = {"sampling_probability": PROBABILITY, "steps": COUNT} | dict.fromkeys(CUT, COUNT)
STEPS = {"noise_multiplier": 1.0, **SAMPLED, **CUT}
BATCHES = {"num_examples": 3, "multiple_of": 1, "start": 0, **SAMPLED}
REFUSED_BATCHES = {
    "num_examples": COUNT,
    "sampling_probability": PROBABILITY,
    "steps": INDEX,
    "multiple_of": COUNT,
    "start": INDEX,
}
DESCENT = {"regularization": POSITIVE, "step_size": POSITIVE, "steps": COUNT}
DESCENDING = {"regularization": 0.1, "step_size": 0.1, "steps": 2}
GRAM_BOUNDS = {"column_bound": (0, -1, float("inf"), 1e200), "eta": POSITIVE, "n": COUNT}
MEMORY = {"K": K, "V": V, "key_bound": 1.0, "value_bound": 1.0, **WITHIN}
MEMORY_BOUNDS = {"key_bound": POSITIVE, "value_bound": POSITIVE}
GRADIENT = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4.0, "key": KEY}


def _guarantee(**numbers):
    words = {"neighboring": privacy.REPLACE_ONE, "unit": "row", "mechanism": "by hand"}
    return privacy.PrivacyGuarantee(**numbers, **words)


def _of_law(law, **numbers):
    return law(**numbers).guarantee(1.0, delta=1e-5, neighboring=privacy.REPLACE_ONE, unit="row")


CALLS = {
    "gaussian_noise_multiplier": Call(
        dpx.gaussian_noise_multiplier,
        {**WITHIN, "compositions": 1},
        BUDGET | {"compositions": COUNT},
    ),
    "gaussian_epsilon": Call(
        dpx.gaussian_epsilon,
        {"noise_multiplier": 1.0, "delta": 1e-5, "compositions": 1},
        {"noise_multiplier": NOISE, "delta": DELTA, "compositions": COUNT},
    ),
    "gaussian_budget": Call(
        privacy.gaussian_budget,
        {"noise_multiplier": 1.0, "delta": 1e-5},
        {"noise_multiplier": (0, -1), "delta": DELTA},
    ),
    "calibrate_dpsgd": Call(
        dpx.calibrate_dpsgd,
        {**WITHIN, **SAMPLED, **CUT},
        BUDGET | REFUSED_STEPS,
    ),
    "dpsgd_epsilon": Call(
        dpx.dpsgd_epsilon,
        {"delta": 1e-5, **STEPS},
        {"noise_multiplier": NOISE, "delta": DELTA, **REFUSED_STEPS},
    ),
    "dpsgd_event": Call(
        privacy.dpsgd_event,
        STEPS,
        {"noise_multiplier": NOISE, **REFUSED_STEPS},
    ),
    "truncation_probability": Call(
        privacy.truncation_probability,
        {"sampling_probability": 0.5, **CUT},
        {k: v for k, v in REFUSED_STEPS.items() if k != "steps"},
    ),
    "dpsgd_guarantee": Call(
        functools.partial(privacy.dpsgd_guarantee, unit="user"),
        {"delta": 1e-5, **STEPS},
        {"noise_multiplier": NOISE, "delta": DELTA, **REFUSED_STEPS},
    ),
    "PrivacyGuarantee": Call(
        _guarantee, {"epsilon": 1.0, "delta": 1e-5}, {"epsilon": (-1,), "delta": (-1, 1)}
    ),
    "Ledger.guarantee": Call(
        lambda delta: dpx.Ledger().spend(_guarantee(epsilon=1, delta=1e-6), "a").guarantee(delta),
        {"delta": 1e-5},
        {"delta": DELTA},
    ),
    "poisson_batches": Call(
        lambda **given: list(dpx.poisson_batches(**given, seed=0)),
        {"max_batch_size": None, **BATCHES},
        {"max_batch_size": COUNT, **REFUSED_BATCHES},
    ),
    "allocated_batches": Call(
        lambda **given: list(dpx.training.allocated_batches(**given, seed=0)),
        BATCHES,
        REFUSED_BATCHES,
    ),
    "Poisson": Call(Poisson, {"max_batch_size": None}, {"max_batch_size": COUNT}),
    "poisson_batches, seed": Call(
        lambda seed: list(dpx.poisson_batches(3, **SAMPLED, seed=seed)),
        {"seed": 0},
        {"seed": (-1, 1.5, float("inf"))},
    ),
    "privatize": Call(
        dpx.privatize,
        GRADIENT,
        {
            "l2_clip_norm": POSITIVE,
            "noise_multiplier": NOT_NEGATIVE,
            "expected_batch_size": POSITIVE,
        },
        trees=("l2_clip_norm",),
    ),
    "clipped_grad": Call(
        functools.partial(dpx.clipped_grad, lambda params, x: (params * x).sum()),
        {"l2_clip_norm": 1.0, "microbatch_size": None},
        {"l2_clip_norm": POSITIVE, "microbatch_size": COUNT},
        trees=("l2_clip_norm",),
    ),
    "training.plan": Call(
        dpx.training.plan,
        {"num_records": 64, "epsilon": 1.0, "delta": 1e-3, "epochs": 2, "steps": 4},
        BUDGET | {"num_records": COUNT, "epochs": (*POSITIVE, 5), "steps": COUNT},
        optional=("steps",),
    ),
    "training.fit": Call(
        functools.partial(
            dpx.training.fit,
            lambda params, x: (params * x).sum(),
            np.ones(2, "f4"),
            np.ones((8, 2)),
            optimizer=optax.sgd(0.1),
            key=KEY,
        ),
        {
            "epsilon": 1.0,
            "delta": 1e-3,
            "batch_size": 4,
            "steps": 2,
            "l2_clip_norm": 1.0,
            "microbatch_size": None,
            "sampling": "auto",
        },
        BUDGET
        | {
            "batch_size": (*POSITIVE, 9),
            "steps": COUNT,
            "l2_clip_norm": POSITIVE,
            "microbatch_size": COUNT,
            "sampling": ("shuffle", None, 3),
        },
        optional=("l2_clip_norm",),
        trees=("l2_clip_norm",),
    ),
    "Gaussian": Call(
        functools.partial(_of_law, noise.Gaussian), {"std": 1.0}, {"std": POSITIVE}, trees=("std",)
    ),
    "TruncatedLaplace": Call(
        noise.TruncatedLaplace,
        {"scale": 1.0, "bound": 2.0},
        {"scale": POSITIVE, "bound": POSITIVE},
        trees=("scale", "bound"),
    ),
    "Laplace": Call(noise.Laplace, {"scale": 1.0}, {"scale": POSITIVE}, trees=("scale",)),
    "popularity.fit": Call(
        functools.partial(popularity.fit, KEY, HISTORIES),
        {**WITHIN, "l2_clip_norm": 1.0, "age_decay": 0.9},
        BUDGET | {"l2_clip_norm": POSITIVE, "age_decay": PROBABILITY},
    ),
    "ngram.fit": Call(
        functools.partial(ngram.fit, KEY, TOKENS, np.ones((2, 3), bool), unit="name"),
        {"order": 2, "vocab_size": 3, "start": 0, "l2_clip_norm": 1.0, **WITHIN},
        BUDGET
        | {
            "order": COUNT,
            "vocab_size": COUNT,
            "start": (*INDEX, 3),
            "l2_clip_norm": POSITIVE,
        },
    ),
    "transitions.fit": Call(
        functools.partial(transitions.fit, KEY, HISTORIES),
        {
            "num_kept": None,
            "popularity_budget_fraction": 0.1,
            "rounds": 1,
            "gap_decay": 0.9,
            "max_gap": 2,
            "age_decay": 0.9,
            "popularity_age_decay": 0.9,
            "order_weight": 0.3,
            "position_weight": 0.3,
            **WITHIN,
        },
        BUDGET
        | {
            "num_kept": (*COUNT, 9),
            "popularity_budget_fraction": SHARE,
            "rounds": COUNT,
            "max_gap": COUNT,
            "gap_decay": PROBABILITY,
            "age_decay": PROBABILITY,
            "popularity_age_decay": PROBABILITY,
            "order_weight": WEIGHT,
            "position_weight": WEIGHT,
        },
    ),
    "item_gram.fit": Call(
        functools.partial(item_gram.fit, KEY, HISTORIES),
        {"num_kept": None, "popularity_budget_fraction": 0.1, **WITHIN},
        BUDGET | {"num_kept": (*COUNT, 9), "popularity_budget_fraction": SHARE},
    ),
    "item_gram.ease": Call(
        functools.partial(item_gram.ease, np.eye(2)),
        {"regularization": 1.0},
        {"regularization": POSITIVE},
    ),
    "item_gram.item_attention": Call(
        functools.partial(item_gram.item_attention, np.eye(2)),
        {"temperature": 1.0},
        {"temperature": POSITIVE},
    ),
    "gram.release": Call(
        functools.partial(gram.release, KEY, np.ones((2, 5))),
        {"column_bound": 2.0, "max_column_change": None, **WITHIN},
        BUDGET | {"column_bound": (*POSITIVE, 1e200), "max_column_change": (*POSITIVE, 5.0)},
    ),
    "gram.release, sampling": Call(
        functools.partial(
            gram.release, KEY, np.ones((2, 5)), column_bound=2.0, mechanism="sampling"
        ),
        {"eta": 1e3, **WITHIN},
        BUDGET | {"eta": POSITIVE},
    ),
    "gram.frobenius_sensitivity": Call(
        gram.frobenius_sensitivity,
        {"column_bound": 1.0, "max_column_change": 1.0},
        {"column_bound": POSITIVE, "max_column_change": (*POSITIVE, 3.0)},
    ),
    "gram.max_samples": Call(
        gram.max_samples, {"column_bound": 1.0, "eta": 1e3, "n": 2, **WITHIN}, BUDGET | GRAM_BOUNDS
    ),
    "gram.sampling_epsilon": Call(
        gram.sampling_epsilon,
        {"num_samples": 5, "delta": 1e-5, "column_bound": 1.0, "eta": 1e3, "n": 2},
        {"num_samples": COUNT, "delta": DELTA, **GRAM_BOUNDS},
    ),
    "gram.utility_bounds": Call(
        gram.utility_bounds,
        {"n": 2, "logit_bound": 1.0, "relative_error": 0.1},
        {"n": COUNT, "logit_bound": POSITIVE, "relative_error": NOT_NEGATIVE},
    ),
    "gram.gaussian_entry_error": Call(
        gram.gaussian_entry_error,
        {"noise_std": 1.0, "n": 2, "failure_probability": 0.1},
        {"noise_std": NOT_NEGATIVE, "n": COUNT, "failure_probability": SHARE},
    ),
    "gram.sampling_entry_error": Call(
        gram.sampling_entry_error,
        {"num_samples": 2, "n": 2, "diagonal_bound": 1.0, "failure_probability": 0.1},
        {
            "num_samples": COUNT,
            "n": COUNT,
            "diagonal_bound": POSITIVE,
            "failure_probability": SHARE,
        },
    ),
    "noisy_head.fit": Call(
        functools.partial(noisy_head.fit, KEY, FEATURES, HYPER),
        {**DESCENDING, **WITHIN},
        BUDGET | DESCENT,
    ),
    "noisy_head.fit_one_shot": Call(
        functools.partial(noisy_head.fit_one_shot, KEY, FEATURES, HYPER),
        {"regularization": 0.1, **WITHIN},
        BUDGET | {"regularization": POSITIVE},
    ),
    "noisy_head.Descent": Call(functools.partial(noisy_head.Descent, HYPER), DESCENDING, DESCENT),
    "noisy_head.hyperparameters": Call(
        noisy_head.hyperparameters,
        {
            "num_prompts": 4,
            "length": 3,
            "dim": 2,
            "regularization": 0.1,
            "noise_std": 0.0,
            "kappa": 1.0,
        },
        {
            "num_prompts": COUNT,
            "length": COUNT,
            "dim": COUNT,
            "regularization": POSITIVE,
            "noise_std": NOT_NEGATIVE,
            "kappa": PROBABILITY,
        },
    ),
    "noisy_head.sample_prompts": Call(
        functools.partial(noisy_head.sample_prompts, KEY),
        {"num_prompts": 4, "length": 3, "dim": 2, "noise_std": 0.0},
        {"num_prompts": COUNT, "length": COUNT, "dim": COUNT, "noise_std": NOT_NEGATIVE},
    ),
    "noisy_head.ridge": Call(
        functools.partial(noisy_head.ridge, FEATURES),
        {"regularization": 0.1},
        {"regularization": POSITIVE},
    ),
    "noisy_head.population_risk": Call(
        functools.partial(noisy_head.population_risk, np.eye(2)),
        {"length": 3, "noise_std": 0.0},
        {"length": COUNT, "noise_std": NOT_NEGATIVE},
    ),
    "cross_attention.sketch": Call(
        functools.partial(cross_attention.build, KEY),
        {**MEMORY, "query_bound": None, "scale": None, "degree": None, "relative_error": 1e-4},
        BUDGET
        | MEMORY_BOUNDS
        | {
            "query_bound": POSITIVE,
            "scale": POSITIVE,
            "degree": (*INDEX, 3),
            "relative_error": POSITIVE,
        },
    ),
    "cross_attention.sketch, random": Call(
        functools.partial(cross_attention.build, KEY, features="random"),
        {**MEMORY, "num_features": 4, "contribution_bound": None},
        {"num_features": COUNT, "contribution_bound": POSITIVE},
    ),
    "cross_attention.tree": Call(
        functools.partial(cross_attention.build, KEY, mechanism="tree"),
        {**MEMORY, "degree": None, "copies": 1, "bins": None, "scale": None},
        BUDGET
        | MEMORY_BOUNDS
        | {"degree": INDEX, "copies": COUNT, "bins": COUNT, "scale": POSITIVE},
    ),
    "baselines.mean_of_values": Call(
        functools.partial(baselines.mean_of_values, KEY, V),
        {"value_bound": 1.0, **WITHIN},
        BUDGET | {"value_bound": POSITIVE},
    ),
    "baselines.fresh_noise": Call(
        functools.partial(baselines.fresh_noise, KEY, Q),
        {**MEMORY, "num_queries": None, "query_bound": None, "scale": None},
        BUDGET
        | MEMORY_BOUNDS
        | {"num_queries": (*COUNT, 1), "query_bound": POSITIVE, "scale": POSITIVE},
    ),
    "DPTree.build": Call(
        functools.partial(cross_attention.DPTree.build, KEY, np.ones(4)),
        {"sensitivity": 1.0, "bound": 1.0, **WITHIN},
        BUDGET | {"sensitivity": POSITIVE, "bound": POSITIVE},
        trees=("sensitivity", "bound"),
    ),
    "DPTreeHighDim.build": Call(
        functools.partial(cross_attention.DPTreeHighDim.build, KEY, K, np.ones(5)),
        {"bound": 1.0, "weight_bound": 1.0, "power": 2, "bins": None, **WITHIN},
        BUDGET | {"bound": POSITIVE, "weight_bound": POSITIVE, "power": COUNT, "bins": COUNT},
        trees=("bound", "weight_bound"),
    ),
    "PolynomialFeatures": Call(
        PolynomialFeatures,
        {"dim": 2, "degree": 2, "scale": None},
        {"dim": COUNT, "degree": INDEX, "scale": POSITIVE},
    ),
    "reattention.effective_noise_std": Call(
        reattention.effective_noise_std,
        {"noise_multiplier": 1.0, "batch_size": 4.0, "l2_clip_norm": 1.0, "floor": 1e-6},
        {
            "noise_multiplier": NOT_NEGATIVE,
            "batch_size": POSITIVE,
            "l2_clip_norm": POSITIVE,
            "floor": POSITIVE,
        },
    ),
    "reattention.token_probabilities": Call(
        functools.partial(reattention.token_probabilities, KEY, HISTORIES),
        {"max_tokens": 2, **WITHIN},
        BUDGET | {"max_tokens": COUNT},
    ),
    "reattention.uniform_probabilities": Call(
        reattention.uniform_probabilities,
        {"num_tokens": 3, "length": 2},
        {"num_tokens": COUNT, "length": COUNT},
    ),
    "attention.dot_product_attention": Call(
        functools.partial(dpx.attention.dot_product_attention, K, K, V),
        {"scale": None},
        {"scale": POSITIVE},
    ),
    "synthetic_histories": Call(
        synthetic_histories,
        {"num_users": 3, "length": 2, "num_items": 4, "zipf_exponent": 1.0, "predictability": 0.5},
        {
            "num_users": COUNT,
            "length": COUNT,
            "num_items": COUNT,
            "zipf_exponent": NOT_NEGATIVE,
            "predictability": (-0.1, 1.1, float("inf")),
        },
    ),
}

CASES = [
    pytest.param(call, argument, value, id=f"{name}-{argument}={value!r}")
    for name, call in CALLS.items()
    for argument, values in call.refused.items()
    for value in (*NO_NUMBERS, *values)
    if not (value is None and (argument in call.optional or call.right[argument] is None))
    if not (value == [1.0] and argument in call.trees)
]


@pytest.fixture(autouse=True)
def patience():
    """No call takes longer than ten seconds."""

    def late(*args):
        raise TimeoutError("the call did not end")

    # Seconds of this process, so that other programs on the machine do not count.
    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, 10)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.fixture
def no_noise(monkeypatch):
    """Drawing anything at random is a failure."""

    def drawn(*args, **kwargs):
        raise AssertionError("noise was drawn")

    for name in ("bits", "normal", "uniform", "exponential"):
        monkeypatch.setattr(jax.random, name, drawn)


@pytest.mark.parametrize(("call", "argument", "value"), CASES)
def test_a_wrong_number_is_named_before_noise_is_drawn(no_noise, call, argument, value):
    with pytest.raises(ValueError, match=argument) as error:
        call(**{argument: value})
    assert len(str(error.value).splitlines()) == 1


def test_there_are_many_cases():
    assert len(CASES) > 1000
    assert len(SETTINGS) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_the_calls_that_the_cases_change_are_right(name):
    CALLS[name]()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    "event",
    [
        GaussianDpEvent(float("nan")),
        GaussianDpEvent(-1.0),
        SelfComposedDpEvent(GaussianDpEvent(float("nan")), 3),
        ComposedDpEvent([GaussianDpEvent(1.0), GaussianDpEvent(float("nan"))]),
        PoissonSampledDpEvent(float("nan"), GaussianDpEvent(1.0)),
        PoissonSampledDpEvent(2.0, GaussianDpEvent(1.0)),
    ],
    ids=str,
)
def test_events_that_no_mechanism_has_are_named(accountant, event):
    with pytest.raises(ValueError, match="beside"):
        dpx.calibrate_dpsgd(2.0, 1e-5, **SAMPLED, accountant=accountant, beside=event)
    with pytest.raises(ValueError, match="a release"):
        dpx.Ledger().spend(event, "a release")
    with pytest.raises(ValueError, match="event"):
        dataclasses.replace(_guarantee(epsilon=1.0, delta=1e-5), event=event)


LARGE = [
    (name, argument)
    for name, call in CALLS.items()
    for argument in (
        "l2_clip_norm",
        "column_bound",
        "key_bound",
        "value_bound",
        "query_bound",
        "bound",
    )
    if argument in call.refused and "epsilon" in call.refused
]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e10, 1e30, 1e100, 1e200, 1e308])
@pytest.mark.parametrize(("name", "argument"), LARGE)
def test_bounds_too_large_to_compute_with_are_named_or_released_finite(name, argument, size):
    try:
        released = CALLS[name](**{argument: size})
    except ValueError:
        return
    leaves = jax.tree.leaves(released)
    assert all(
        np.isfinite(leaf).all() for leaf in leaves if isinstance(leaf, np.ndarray | jax.Array)
    )


# ---------------------------------------------------------------------------------------------------------
# Command lines

CONFIGS = (
    "quickstart.py:tiny",
    "recommender.py:synthetic,tiny",
    "noisy_head.py:low_dim,tiny",
    "gram.py:tiny",
    "cross_attention.py:tiny",
    "reattention.py:tiny",
)
NOT_A_NUMBER = float("nan")
SETTINGS = [
    (source, name, value)
    for source in CONFIGS
    for name, values in {
        "epsilon": (*EPSILON, NOT_A_NUMBER),
        "delta": (*DELTA, NOT_A_NUMBER),
        "seed": (-1,),
        "noise_seed": (-1,),
    }.items()
    for value in values
] + [
    (source, f"{section}.{name}", value)
    for source in ("quickstart.py:tiny", "recommender.py:synthetic,tiny", "reattention.py:tiny")
    for section, names in {
        "train": {
            "steps": (0, -1), "batch_size": (0, -1, 10**6), "microbatch_size": (0, -1),
            "learning_rate": (*POSITIVE, NOT_A_NUMBER), "l2_clip_norm": (*POSITIVE, NOT_A_NUMBER),
            "warmup": (-0.1, 1.1, NOT_A_NUMBER), "weight_decay": (*NOT_NEGATIVE, NOT_A_NUMBER),
            "log_every": (0,), "checkpoint_every": (0,), "accountant": ("none",), "sampling": ("shuffle",),
            "compute_dtype": ("float16", "half"),
        },
        "model": {"dim": (0, -1), "num_blocks": (0,), "dropout": (-0.1, 1.0, NOT_A_NUMBER)},
    }.items()
    for name, values in names.items()
    for value in values
] + [
    (source, f"mesh.{name}", value)
    for source in ("quickstart.py:tiny", "recommender.py:synthetic,tiny")
    for name, value in (("data", 0), ("data", 64), ("model", -1))
]  # fmt: skip


@pytest.mark.quick_cases(
    "quickstart.py:tiny-train.weight_decay-inf",
    "quickstart.py:tiny-train.learning_rate-nan",
    "quickstart.py:tiny-model.num_blocks-0",
)
@pytest.mark.parametrize(("source", "name", "value"), SETTINGS)
def test_a_wrong_setting_is_named_before_anything_runs(no_noise, tmp_path, source, name, value):
    config = records.load_config(f"configs/{source}")
    default = records.flatten(config)[name]
    config.update_from_flattened_dict({name: float(value) if isinstance(default, float) else value})
    with pytest.raises(ValueError, match=name.rpartition(".")[2]) as error:
        run.prepare(config, f"configs/{source}", tmp_path / "run")
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()
