"""What every public function owes its caller, whatever types, keys and promotions a program has."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import release_cases
from release_cases import leaves, made, records_of

import dpx
from dpx import cross_attention, gram, noise, noisy_head, privacy, training

KEY = jax.random.key(0)
BUDGET = {"epsilon": 3.0, "delta": 1e-4}
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(12, 3)).astype(np.float32)
KEYS = RNG.random((8, 1)).astype(np.float32)
BOUNDS = noisy_head.HyperParameters(1.0, 1.0, 1.0)


def fitted(key, **options):
    def loss(params, row):
        return jnp.sum(jnp.square(params["w"] @ row + params["b"]))

    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(2)}
    sizes = {"sampling": "poisson", "batch_size": 4, "steps": 2, "key": key, "log_every": 1}
    clip = {"l2_clip_norm": 1.0, "optimizer": optax.adam(0.1)}
    return training.fit(loss, params, (ROWS,), **(BUDGET | sizes | clip | options)).params


def privatized(key, *, jit):
    setting = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4}
    private = training.privatize(key=key, **setting)
    state = private.init(ROWS)
    return (jax.jit(private.update) if jit else private.update)(ROWS, state)[0]


def remembered(key, **options):
    K, V = KEYS, np.sin(KEYS)
    options = {"key_bound": 1.0, "value_bound": 1.0} | BUDGET | options
    memory = cross_attention.build(key, K, V, **options)
    return memory.query(KEYS[:2])


def prompts():
    return noisy_head.sample_features(
        jax.random.key(0), 6, 5, 2, response_clip=1.0, feature_radius=1.0
    )


GRAM = {"column_bound": 1.0, **BUDGET}
DESCENT = {"regularization": 0.1, "step_size": 0.1, "steps": 2}
RELEASES = {
    "fit": fitted,
    "fit, adaptive": lambda key: fitted(
        key, l2_clip_norm=training.AdaptiveClipNorm(1.0, count_noise=2.0)
    ),
    "fit, banded": lambda key: fitted(key, noise="banded", bands=2),
    "fit, bfloat16": lambda key: fitted(key, compute_dtype=jnp.bfloat16),
    "privatize": lambda key: privatized(key, jit=False),
    "privatize, jitted": lambda key: privatized(key, jit=True),
    "noise": lambda key: noise.release(key, ROWS, sensitivity=1.0, noise_multiplier=1.0, label="x"),
    "noise of a law": lambda key: noise.release(
        key, ROWS, sensitivity=1.0, law=noise.TruncatedLaplace(1.0, 3.0), label="x"
    ),
    "integers": lambda key: noise.release_integers(
        key, np.arange(5), sensitivity=1.0, unit=1.0, noise_multiplier=1.0, label="x"
    ),
    "Laplace": lambda key: noise.Laplace(1.0).sample(key, (5,)),
    "gram, traced": lambda key: jax.jit(lambda X: gram.release(key, X, **GRAM).matrix)(ROWS.T),
    "gram, sampled": lambda key: (
        gram.release(key, ROWS.T, mechanism="sampling", eta=200.0, **GRAM).matrix
    ),
    "memory": remembered,
    "memory, random features": lambda key: remembered(key, features="random", num_features=8),
    "memory, trees": lambda key: remembered(key, mechanism="tree"),
    "NoisyHead": lambda key: (
        noisy_head.fit(key, prompts(), hyper=BOUNDS, **DESCENT, **BUDGET).gamma
    ),
    "one sum of a tree": lambda key: cross_attention.DPTree.build(
        key, np.ones(4), sensitivity=1.0, **BUDGET
    ).query(1.0),
} | {
    name: lambda key, name=name: leaves(made(name, records_of(name), key, **BUDGET))
    for name in release_cases.RELEASES
}


@pytest.mark.quick_cases("Gram")
@pytest.mark.filterwarnings("ignore::dpx.cross_attention.MemoryWarning")
@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_a_release_does_not_need_implicit_promotion(release):
    expected = release(KEY)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.tree.map(np.testing.assert_array_equal, release(KEY), expected)


SECRET = jax.random.wrap_key_data(np.array([[1234567890, 987654321]] * 2, np.uint32))


@pytest.mark.parametrize("key", [0, "0", np.random.default_rng(0), np.ones(2), SECRET], ids=type)
@pytest.mark.parametrize("release", sorted(RELEASES.keys() - {"Laplace"}))
def test_what_is_no_key_is_named_and_no_word_of_it_is_shown(release, key):
    with pytest.raises(ValueError, match="must be one JAX key: use") as raised:
        RELEASES[release](key)
    assert "1234567890" not in str(raised.value)


@pytest.mark.parametrize("seed", [SECRET[0], SECRET, np.array([1234567890, 1])])
def test_a_key_that_is_given_as_a_seed_is_not_shown(seed):
    with pytest.raises(ValueError, match="must be an int or a NumPy SeedSequence") as raised:
        dpx.poisson_batches(10, sampling_probability=0.5, steps=1, seed=seed)
    assert "1234567890" not in str(raised.value)


def test_guarantee_holds_plain_floats():
    words = {"neighboring": privacy.REPLACE_ONE, "unit": "row", "mechanism": "by hand"}
    guarantee = privacy.PrivacyGuarantee(np.float32(1), np.float32(0), **words)
    assert json.loads(json.dumps(guarantee.to_json()))["epsilon"] == 1
    for bad in ({"epsilon": None, "delta": 0.0}, {"epsilon": 1.0, "delta": "0"}):
        with pytest.raises(ValueError, match="must be a number"):
            privacy.PrivacyGuarantee(**bad, **words)


@pytest.mark.quick_cases("random")
@pytest.mark.parametrize("features", ["taylor", "random"])
def test_logits_beyond_all_floats_raise_value_errors_with_a_remedy(features):
    far = {"key_bound": 50.0, "domain": "ball", "scale": 1.0, "features": features}
    with pytest.raises(ValueError, match="larger scale"):
        remembered(KEY, **far)
    assert np.isfinite(
        remembered(KEY, **far | {"features": "random"}, contribution_bound=10.0)
    ).all()


PROMPTS = noisy_head.Features(np.ones((4, 2)), np.ones((4, 2)), np.ones(4))


@pytest.mark.slow
def test_bounds_of_prompts_may_be_a_plain_tuple():
    plain = (1.0, 1.0, 1.0)
    named = noisy_head.HyperParameters(*plain)
    for hyper in (plain, list(plain)):
        got, want = (noisy_head.fit(KEY, PROMPTS, h, **DESCENT, **BUDGET) for h in (hyper, named))
        np.testing.assert_array_equal(got.gamma, want.gamma)
        described = noisy_head.Descent(hyper, regularization=0.1, step_size=0.1, steps=3)
        assert described.hyper == named
        noisy_head.enforce(noisy_head.Features(*map(jax.numpy.asarray, PROMPTS)), hyper)


@pytest.mark.parametrize("hyper", [None, (1.0, None, 1.0)])
def test_noisy_head_names_bounds_that_are_none(hyper):
    with pytest.raises(ValueError, match="hyper"):
        noisy_head.fit(KEY, PROMPTS, hyper, **DESCENT, **BUDGET)


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
