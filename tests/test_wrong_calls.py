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
from dpx.recommend import (
    item_gram,
    popularity,
    transitions,
)
from dpx.runs import records, run
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


@dataclasses.dataclass(frozen=True)
class Call:
    """A right call, and what each of its arguments refuses.

    An argument may be None where it is in the right call, or in `optional`.
    """

    function: Callable
    right: dict[str, Any]
    own: dict[str, tuple] = dataclasses.field(
        default_factory=dict
    )  # where it differs from `REFUSED`
    optional: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()  # arguments that may be arrays, or trees of numbers

    @property
    def refused(self):
        named = {name: REFUSED[name] for name in self.right if name in REFUSED}
        return {**named, **self.own}

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
STEPS = {"noise_multiplier": 1.0, **SAMPLED, **CUT}
BATCHES = {"num_examples": 3, "multiple_of": 1, "start": 0, **SAMPLED}
DESCENDING = {"regularization": 0.1, "step_size": 0.1, "steps": 2}
MEMORY = {"K": K, "V": V, "key_bound": 1.0, "value_bound": 1.0, **WITHIN}
GRADIENT = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4.0, "key": KEY}


def _guarantee(**numbers):
    words = {"neighboring": privacy.REPLACE_ONE, "unit": "row", "mechanism": "by hand"}
    return privacy.PrivacyGuarantee(**numbers, **words)


def _of_law(law, **numbers):
    return law(**numbers).guarantee(1.0, delta=1e-5, neighboring=privacy.REPLACE_ONE, unit="row")


# What an argument of a name refuses, where its call says nothing else.
REFUSED = {
    name: values
    for values, names in (
        (EPSILON, "epsilon"),
        (DELTA, "delta"),
        (NOISE, "noise_multiplier"),
        (COUNT, "compositions steps num_examples max_batch_size multiple_of microbatch_size order"),
        (COUNT, "num_records vocab_size rounds max_gap n num_samples num_prompts length dim power"),
        (COUNT, "num_features copies bins max_tokens num_tokens num_users num_items"),
        ((*COUNT, 9), "num_kept"),
        ((*COUNT, 1), "num_queries"),
        (INDEX, "start degree seed"),
        (PROBABILITY, "sampling_probability age_decay gap_decay popularity_age_decay kappa"),
        (SHARE, "popularity_budget_fraction failure_probability"),
        (WEIGHT, "order_weight position_weight predictability"),
        (POSITIVE, "l2_clip_norm expected_batch_size std scale bound regularization temperature"),
        (POSITIVE, "eta logit_bound diagonal_bound step_size key_bound value_bound query_bound"),
        (POSITIVE, "contribution_bound sensitivity weight_bound floor"),
        ((*POSITIVE, 5), "epochs max_column_change"),
        ((*POSITIVE, 9), "batch_size"),
        ((*POSITIVE, 1e200), "column_bound"),
        (NOT_NEGATIVE, "relative_error noise_std zipf_exponent"),
        (("shuffle", None, 3), "sampling"),
    )
    for name in names.split()
}

CALLS = {
    "gaussian_noise_multiplier": Call(dpx.gaussian_noise_multiplier, {**WITHIN, "compositions": 1}),
    "gaussian_epsilon": Call(
        dpx.gaussian_epsilon, {"noise_multiplier": 1.0, "delta": 1e-5, "compositions": 1}
    ),
    "gaussian_budget": Call(
        privacy.gaussian_budget,
        {"noise_multiplier": 1.0, "delta": 1e-5},
        {"noise_multiplier": (0, -1)},
    ),
    "calibrate_dpsgd": Call(dpx.calibrate_dpsgd, {**WITHIN, **SAMPLED, **CUT}),
    "dpsgd_epsilon": Call(dpx.dpsgd_epsilon, {"delta": 1e-5, **STEPS}),
    "dpsgd_event": Call(privacy.dpsgd_event, STEPS),
    "truncation_probability": Call(
        privacy.truncation_probability, {"sampling_probability": 0.5, **CUT}
    ),
    "dpsgd_guarantee": Call(
        functools.partial(privacy.dpsgd_guarantee, unit="user"), {"delta": 1e-5, **STEPS}
    ),
    "PrivacyGuarantee": Call(
        _guarantee, {"epsilon": 1.0, "delta": 1e-5}, {"epsilon": NOISE, "delta": (-1, 1)}
    ),
    "Ledger.guarantee": Call(
        lambda delta: dpx.Ledger().spend(_guarantee(epsilon=1, delta=1e-6), "a").guarantee(delta),
        {"delta": 1e-5},
    ),
    "poisson_batches": Call(
        lambda **given: list(dpx.poisson_batches(**given, seed=0)),
        {"max_batch_size": None, **BATCHES},
        {"steps": INDEX},
    ),
    "allocated_batches": Call(
        lambda **given: list(dpx.training.allocated_batches(**given, seed=0)),
        BATCHES,
        {"steps": INDEX},
    ),
    "Poisson": Call(Poisson, {"max_batch_size": None}),
    "poisson_batches, seed": Call(
        lambda seed: list(dpx.poisson_batches(3, **SAMPLED, seed=seed)), {"seed": 0}
    ),
    "privatize": Call(
        dpx.privatize, GRADIENT, {"noise_multiplier": NOT_NEGATIVE}, trees=("l2_clip_norm",)
    ),
    "clipped_grad": Call(
        functools.partial(dpx.clipped_grad, lambda params, x: (params * x).sum()),
        {"l2_clip_norm": 1.0, "microbatch_size": None},
        trees=("l2_clip_norm",),
    ),
    "training.plan": Call(
        dpx.training.plan,
        {"num_records": 64, "epsilon": 1.0, "delta": 1e-3, "epochs": 2, "steps": 4},
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
        optional=("l2_clip_norm",),
        trees=("l2_clip_norm",),
    ),
    "Gaussian": Call(functools.partial(_of_law, noise.Gaussian), {"std": 1.0}, trees=("std",)),
    "TruncatedLaplace": Call(
        noise.TruncatedLaplace, {"scale": 1.0, "bound": 2.0}, trees=("scale", "bound")
    ),
    "Laplace": Call(noise.Laplace, {"scale": 1.0}, trees=("scale",)),
    "popularity.fit": Call(
        functools.partial(popularity.fit, KEY, HISTORIES),
        {**WITHIN, "l2_clip_norm": 1.0, "age_decay": 0.9},
    ),
    "ngram.fit": Call(
        functools.partial(ngram.fit, KEY, TOKENS, np.ones((2, 3), bool), unit="name"),
        {"order": 2, "vocab_size": 3, "start": 0, "l2_clip_norm": 1.0, **WITHIN},
        {"start": (*INDEX, 3)},
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
    ),
    "item_gram.fit": Call(
        functools.partial(item_gram.fit, KEY, HISTORIES),
        {"num_kept": None, "popularity_budget_fraction": 0.1, **WITHIN},
    ),
    "item_gram.ease": Call(functools.partial(item_gram.ease, np.eye(2)), {"regularization": 1.0}),
    "item_gram.item_attention": Call(
        functools.partial(item_gram.item_attention, np.eye(2)), {"temperature": 1.0}
    ),
    "gram.release": Call(
        functools.partial(gram.release, KEY, np.ones((2, 5))),
        {"column_bound": 2.0, "max_column_change": None, **WITHIN},
    ),
    "gram.release, sampling": Call(
        functools.partial(
            gram.release, KEY, np.ones((2, 5)), column_bound=2.0, mechanism="sampling"
        ),
        {"eta": 1e3, **WITHIN},
    ),
    "gram.frobenius_sensitivity": Call(
        gram.frobenius_sensitivity,
        {"column_bound": 1.0, "max_column_change": 1.0},
        {"column_bound": POSITIVE, "max_column_change": (*POSITIVE, 3.0)},
    ),
    "gram.max_samples": Call(gram.max_samples, {"column_bound": 1.0, "eta": 1e3, "n": 2, **WITHIN}),
    "gram.sampling_epsilon": Call(
        gram.sampling_epsilon,
        {"num_samples": 5, "delta": 1e-5, "column_bound": 1.0, "eta": 1e3, "n": 2},
    ),
    "gram.utility_bounds": Call(
        gram.utility_bounds, {"n": 2, "logit_bound": 1.0, "relative_error": 0.1}
    ),
    "gram.gaussian_entry_error": Call(
        gram.gaussian_entry_error, {"noise_std": 1.0, "n": 2, "failure_probability": 0.1}
    ),
    "gram.sampling_entry_error": Call(
        gram.sampling_entry_error,
        {"num_samples": 2, "n": 2, "diagonal_bound": 1.0, "failure_probability": 0.1},
    ),
    "noisy_head.fit": Call(
        functools.partial(noisy_head.fit, KEY, FEATURES, HYPER), {**DESCENDING, **WITHIN}
    ),
    "noisy_head.fit_one_shot": Call(
        functools.partial(noisy_head.fit_one_shot, KEY, FEATURES, HYPER),
        {"regularization": 0.1, **WITHIN},
    ),
    "noisy_head.Descent": Call(functools.partial(noisy_head.Descent, HYPER), DESCENDING),
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
    ),
    "noisy_head.sample_prompts": Call(
        functools.partial(noisy_head.sample_prompts, KEY),
        {"num_prompts": 4, "length": 3, "dim": 2, "noise_std": 0.0},
    ),
    "noisy_head.ridge": Call(
        functools.partial(noisy_head.ridge, FEATURES), {"regularization": 0.1}
    ),
    "noisy_head.population_risk": Call(
        functools.partial(noisy_head.population_risk, np.eye(2)), {"length": 3, "noise_std": 0.0}
    ),
    "cross_attention.sketch": Call(
        functools.partial(cross_attention.build, KEY),
        {**MEMORY, "query_bound": None, "scale": None, "degree": None, "relative_error": 1e-4},
        {"degree": (*INDEX, 3), "relative_error": POSITIVE},
    ),
    "cross_attention.sketch, random": Call(
        functools.partial(cross_attention.build, KEY, features="random"),
        {**MEMORY, "num_features": 4, "contribution_bound": None},
    ),
    "cross_attention.tree": Call(
        functools.partial(cross_attention.build, KEY, mechanism="tree"),
        {**MEMORY, "degree": None, "copies": 1, "bins": None, "scale": None},
    ),
    "baselines.mean_of_values": Call(
        functools.partial(baselines.mean_of_values, KEY, V), {"value_bound": 1.0, **WITHIN}
    ),
    "baselines.fresh_noise": Call(
        functools.partial(baselines.fresh_noise, KEY, Q),
        {**MEMORY, "num_queries": None, "query_bound": None, "scale": None},
    ),
    "DPTree.build": Call(
        functools.partial(cross_attention.DPTree.build, KEY, np.ones(4)),
        {"sensitivity": 1.0, "bound": 1.0, **WITHIN},
        trees=("sensitivity", "bound"),
    ),
    "DPTreeHighDim.build": Call(
        functools.partial(cross_attention.DPTreeHighDim.build, KEY, K, np.ones(5)),
        {"bound": 1.0, "weight_bound": 1.0, "power": 2, "bins": None, **WITHIN},
        trees=("bound", "weight_bound"),
    ),
    "PolynomialFeatures": Call(PolynomialFeatures, {"dim": 2, "degree": 2, "scale": None}),
    "reattention.effective_noise_std": Call(
        reattention.effective_noise_std,
        {"noise_multiplier": 1.0, "batch_size": 4.0, "l2_clip_norm": 1.0, "floor": 1e-6},
        {"noise_multiplier": NOT_NEGATIVE, "batch_size": POSITIVE},
    ),
    "reattention.token_probabilities": Call(
        functools.partial(reattention.token_probabilities, KEY, HISTORIES),
        {"max_tokens": 2, **WITHIN},
    ),
    "reattention.uniform_probabilities": Call(
        reattention.uniform_probabilities, {"num_tokens": 3, "length": 2}
    ),
    "attention.dot_product_attention": Call(
        functools.partial(dpx.attention.dot_product_attention, K, K, V), {"scale": None}
    ),
    "synthetic_histories": Call(
        synthetic_histories,
        {"num_users": 3, "length": 2, "num_items": 4, "zipf_exponent": 1.0, "predictability": 0.5},
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
