"""What every public function owes its caller: bad arguments raise ValueError and are named."""

import json

import jax
import numpy as np
import pytest

import dpx
from dpx import cross_attention, gram, noisy_head, privacy
from dpx.data import Histories
from dpx.recommend import popularity, transitions


def test_epsilon_of_hardly_any_noise_is_infinite():
    assert privacy.gaussian_epsilon(1e-300, 1e-5) == np.inf
    assert privacy.gaussian_epsilon(1e-100, 1e-5) == pytest.approx(5e199)


def test_guarantee_holds_plain_floats():
    words = {"neighboring": privacy.REPLACE_ONE, "unit": "row", "mechanism": "by hand"}
    guarantee = privacy.PrivacyGuarantee(np.float32(1), np.float32(0), **words)
    assert json.loads(json.dumps(guarantee.to_json()))["epsilon"] == 1
    for bad in ({"epsilon": None, "delta": 0.0}, {"epsilon": 1.0, "delta": "0"}):
        with pytest.raises(ValueError, match="must be a number"):
            privacy.PrivacyGuarantee(**bad, **words)


KEY = jax.random.key(0)
BUDGET = {"epsilon": 1.0, "delta": 1e-5}
HISTORIES = Histories(([0, 1], [1, 2]), 3)
BOUNDS = noisy_head.HyperParameters(1.0, 1.0, 1.0)


def memory(key=KEY, **changes):
    options = {"key_bound": 1.0, "value_bound": 1.0} | BUDGET
    return cross_attention.build(key, np.zeros((5, 2)), np.zeros((5, 1)), **(options | changes))


@pytest.mark.quick_cases("random")
@pytest.mark.parametrize("features", ["taylor", "random"])
def test_logits_beyond_all_floats_raise_value_errors_with_a_remedy(features):
    far = {"key_bound": 50.0, "domain": "ball", "scale": 1.0, "features": features}
    with pytest.raises(ValueError, match="larger scale"):
        memory(**far)
    bounded = memory(**far | {"features": "random"}, contribution_bound=10.0)
    assert np.isfinite(bounded.moments).all()


RELEASES = {
    "sketch": memory,
    "trees": lambda key: memory(key, mechanism="tree"),
    "gram": lambda key: gram.release(key, np.ones((2, 3)), column_bound=1.0, **BUDGET),
    "sampled gram": lambda key: gram.release(
        key, np.ones((2, 3)), column_bound=1.0, mechanism="sampling", eta=99.0, **BUDGET
    ),
    "popularity": lambda key: popularity.fit(key, HISTORIES, **BUDGET),
    "transitions": lambda key: transitions.fit(key, HISTORIES, **BUDGET),
    "noisy head": lambda key: noisy_head.fit(key, PROMPTS, BOUNDS, **DESCENT),
    "one shot": lambda key: noisy_head.fit_one_shot(
        key, PROMPTS, BOUNDS, regularization=0.1, **BUDGET
    ),
    "tree of sums": lambda key: cross_attention.DPTree.build(
        key, np.ones(4), sensitivity=1.0, **BUDGET
    ),
    "privatize": lambda key: dpx.privatize(
        l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=1.0, key=key
    ),
    "any release": lambda key: dpx.noise.release(
        key, np.ones(2), sensitivity=1.0, noise_multiplier=1.0, label="x"
    ),
}
SECRET = jax.random.wrap_key_data(np.array([[1234567890, 987654321]] * 2, np.uint32))


@pytest.mark.parametrize("key", [0, "0", np.random.default_rng(0), np.ones(2), SECRET], ids=type)
@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_what_is_no_key_is_named_and_no_word_of_it_is_shown(release, key):
    with pytest.raises(ValueError, match="must be one JAX key: use") as raised:
        release(key)
    assert "1234567890" not in str(raised.value)


@pytest.mark.parametrize("seed", [SECRET[0], SECRET, np.array([1234567890, 1])])
def test_a_key_that_is_given_as_a_seed_is_not_shown(seed):
    with pytest.raises(ValueError, match="must be an int or a NumPy SeedSequence") as raised:
        dpx.poisson_batches(10, sampling_probability=0.5, steps=1, seed=seed)
    assert "1234567890" not in str(raised.value)


PROMPTS = noisy_head.Features(np.ones((4, 2)), np.ones((4, 2)), np.ones(4))
DESCENT = {"regularization": 0.1, "step_size": 0.1, "steps": 3, "epsilon": 1.0, "delta": 1e-5}


@pytest.mark.slow
def test_bounds_of_prompts_may_be_a_plain_tuple():
    plain = (1.0, 1.0, 1.0)
    named = noisy_head.HyperParameters(*plain)
    for hyper in (plain, list(plain)):
        got, want = (noisy_head.fit(KEY, PROMPTS, h, **DESCENT) for h in (hyper, named))
        np.testing.assert_array_equal(got.gamma, want.gamma)
        described = noisy_head.Descent(hyper, regularization=0.1, step_size=0.1, steps=3)
        assert described.hyper == named
        noisy_head.enforce(noisy_head.Features(*map(jax.numpy.asarray, PROMPTS)), hyper)


@pytest.mark.parametrize("hyper", [None, (1.0, None, 1.0)])
def test_noisy_head_names_bounds_that_are_none(hyper):
    with pytest.raises(ValueError, match="hyper"):
        noisy_head.fit(KEY, PROMPTS, hyper, **DESCENT)


def test_reference_of_another_shape_is_named():
    for risk in (
        lambda reference: noisy_head.population_risk(np.ones((2, 2)), 5, reference=reference),
        lambda reference: noisy_head.empirical_risk(np.ones((2, 2)), PROMPTS, reference=reference),
    ):
        with pytest.raises(ValueError, match=r"reference has shape \(3, 3\)"):
            risk(np.ones((3, 3)))
    with pytest.raises(ValueError, match="does not fit gamma"):
        noisy_head.population_risk(np.ones((4, 2, 2)), 5, reference=np.ones((3, 2, 2)))


@pytest.mark.parametrize("bound", [1e-80, 1e-300])
@pytest.mark.parametrize("calibration", ["exact", "paper"])
def test_samples_that_cannot_be_counted_are_named(bound, calibration):
    with pytest.raises(ValueError, match="column_bound"):
        gram.max_samples(1.0, 1e-5, column_bound=bound, eta=1e30, n=2, calibration=calibration)
