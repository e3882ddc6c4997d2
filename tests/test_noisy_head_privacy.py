"""The private side of dpx.noisy_head: noise, sensitivities under attack, guarantees, misuse."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from dpx import noisy_head
from dpx.noisy_head.one_shot import joint_noise, pair_symmetric
from dpx.privacy import REPLACE_ONE, Ledger, gaussian_epsilon, gaussian_noise_multiplier

PAPER = {"accounting": "basic", "sensitivity": "paper", "objective": "paper"}
SETTINGS = {"regularization": 5.0, "step_size": 0.0738207, "steps": 38, "delta": 1e-5}
HYPER = noisy_head.hyperparameters(1000, 31, 5, regularization=5.0, rule="paper")


def features_of(num_prompts=300, length=31, dim=5, seed=0):
    features = noisy_head.sample_features(jax.random.key(seed), num_prompts, length, dim)
    return noisy_head.Features(*map(np.array, features))


@pytest.mark.parametrize(
    ("settings", "accounting", "expected"),
    [
        ({"steps": 38, "epsilon": 1.0}, "basic", 210.7),
        ({"steps": 38, "epsilon": 1.0}, "zcdp", 30.21),
        ({"steps": 38, "epsilon": 1.0}, "gdp", 23.00),
        ({"steps": 38, "epsilon": 0.2}, "basic", 1054),
        ({"steps": 38, "epsilon": 0.2}, "zcdp", 148.5),
        ({"steps": 38, "epsilon": 0.2}, "gdp", 100.5),
        ({"steps": 5, "epsilon": 1.0}, "basic", 25.83),
        ({"steps": 5, "epsilon": 1.0}, "zcdp", 10.96),
        ({"steps": 5, "epsilon": 1.0}, "gdp", 8.342),
        ({"steps": 480, "epsilon": 0.8}, "basic", 3591),
        ({"steps": 480, "epsilon": 0.8}, "zcdp", 133.7),
        ({"steps": 480, "epsilon": 0.8}, "gdp", 100.2),
    ],
)
def test_noise_multipliers(settings, accounting, expected):
    multiplier, _ = noisy_head.calibrate(HYPER, **{**SETTINGS, **settings}, accounting=accounting)
    np.testing.assert_allclose(multiplier, expected, rtol=5e-4)


def test_last_iterate_multipliers():
    for objective, expected in (("paper", 4.877), ("ridge", 7.842)):
        multiplier, guarantee = noisy_head.calibrate(
            HYPER, **SETTINGS, epsilon=1.0, accounting="last_iterate", objective=objective
        )
        np.testing.assert_allclose(multiplier, expected, rtol=2e-4)
        assert any("only the last iterate" in sentence for sentence in guarantee.assumptions)


@pytest.mark.parametrize("steps", [1, 2, 7, 400])
@pytest.mark.parametrize("step_size", [1e-9, 0.05, 0.2, 0.3])
def test_last_iterate_covers_a_linear_map(steps, step_size):
    """Without projection and with H constant, Γ^T is Gaussian: its own μ must not exceed the claimed one."""
    hyper = noisy_head.HyperParameters(1.0, 1.0, 3.0)
    multiplier, _ = noisy_head.calibrate(
        hyper,
        regularization=5.0,
        step_size=step_size,
        steps=steps,
        epsilon=1.0,
        delta=1e-5,
        accounting="last_iterate",
    )
    claimed = 1 / gaussian_noise_multiplier(1.0, 1e-5)
    for curvature in (0.0, 0.4, 1.0):  # H ranges over [0, G²]
        powers = (1 - step_size * (5.0 + curvature)) ** np.arange(steps)
        shift, spread = abs(powers.sum()), np.sqrt((powers**2).sum())
        # A neighbour may also push with alternating signs, where the slope is negative.
        worst = max(shift, np.abs(powers).sum())
        assert worst / spread / multiplier <= claimed * (1 + 1e-9)
    slope = np.abs(1 - step_size * np.array([5.0, 6.0])).max()
    powers = slope ** np.arange(steps)
    attained = powers.sum() / np.sqrt((powers**2).sum()) / multiplier
    np.testing.assert_allclose(attained, claimed, rtol=1e-6)


def unit_ball(values):
    return values / jnp.maximum(1, jnp.linalg.norm(values))


def neighbours(parameters, hyper):
    """Two prompts as matrices within the bounds and a Γ in the ball, from free parameters."""
    C, G, R = hyper
    query, context, targets, gamma = parameters
    Z = [G * jnp.outer(unit_ball(query[i]), unit_ball(context[i])) for i in range(2)]
    return Z, C * jnp.tanh(targets), R * unit_ball(gamma)


def gradient_gap(parameters, hyper):
    (Z, Z2), t, gamma = neighbours(parameters, hyper)
    one = (jnp.sum(gamma * Z) - t[0]) * Z
    return jnp.linalg.norm(one - (jnp.sum(gamma * Z2) - t[1]) * Z2)


def joint_gap(parameters, hyper):
    """Distance of (H, b·h) between neighbours, in units of the claimed sensitivity."""
    (Z, Z2), t, _ = neighbours(parameters, hyper)
    std_H, std_h = joint_noise(hyper)
    a, b = Z.reshape(-1), Z2.reshape(-1)
    gap_H = jnp.sum((jnp.outer(a, a) - jnp.outer(b, b)) ** 2)
    gap_h = jnp.sum((t[0] * a - t[1] * b) ** 2)
    return jnp.sqrt(gap_H / std_H**2 + gap_h / std_h**2)


def worst_by_ascent(gap, hyper, dim=3, starts=64):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, dim), (2, dim), (2,), (dim, dim)]
    scales = [2.0, 2.0, 2.0, 2.0]
    parameters = [
        scale * jax.random.normal(key, (starts, *shape))
        for key, shape, scale in zip(keys, shapes, scales, strict=True)
    ]

    @jax.jit
    def ascend(parameters):
        random = jax.vmap(lambda p: gap(p, hyper))(parameters)

        def step(_, p):
            slope = jax.vmap(jax.grad(lambda p: jnp.log(gap(p, hyper) + 1e-12)))(p)
            return [x + 0.05 * jnp.nan_to_num(g) for x, g in zip(p, slope, strict=True)]

        found = jax.lax.fori_loop(0, 600, step, parameters)
        return jnp.maximum(random.max(), jax.vmap(lambda p: gap(p, hyper))(found).max())

    return float(ascend(parameters))


@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_gradient_sensitivity_under_attack(ratio):
    hyper = noisy_head.HyperParameters(1.5, 0.8, ratio * 1.5 / 0.8)
    worst = worst_by_ascent(gradient_gap, hyper)
    tight = noisy_head.gradient_sensitivity(hyper)
    assert 0.85 * tight <= worst <= tight * (1 + 1e-5)
    assert tight <= noisy_head.gradient_sensitivity(hyper, "paper")


@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_joint_sensitivity_under_attack(ratio):
    worst = worst_by_ascent(joint_gap, noisy_head.HyperParameters(1.5, 0.8, ratio * 1.5 / 0.8))
    assert 0.97 <= worst <= 1 + 1e-5


def test_sensitivities_of_the_note():
    np.testing.assert_allclose(noisy_head.gradient_sensitivity(HYPER, "paper"), 84.3, atol=0.05)
    np.testing.assert_allclose(noisy_head.gradient_sensitivity(HYPER), 47.8, atol=0.05)


@pytest.mark.parametrize("dim", [4, 10])
def test_zero_noise_is_projected_gradient_descent(dim):
    """Algorithm 1 as printed, in NumPy, on prompts that its bounds bite."""
    features = features_of(60, 6, dim)
    hyper = noisy_head.HyperParameters(0.8, 0.15, 0.3)
    found = noisy_head.noisy_descent(
        jax.random.key(0), features, hyper, regularization=0.2, step_size=2.0, steps=5,
        noise_multiplier=0.0, objective="paper", trajectory=True,
    )  # fmt: skip
    Z = np.einsum("ni,nj->nij", features.query, features.context)
    Z *= np.minimum(1, 0.15 / np.linalg.norm(Z, axis=(1, 2)))[:, None, None]
    t = np.clip(features.target, -0.8, 0.8)
    gamma = np.zeros((dim, dim))
    for step in range(5):
        residual = np.einsum("ij,nij->n", gamma, Z) - t
        gamma = (1 - 2 * 0.2 * 2.0) * gamma - 2.0 * np.einsum("n,nij->ij", residual, Z) / 60
        gamma *= min(1, 0.3 / np.linalg.norm(gamma))
        np.testing.assert_allclose(found[step], gamma, atol=1e-14)


def test_huge_budget_is_ridge():
    features = features_of()
    hyper = noisy_head.HyperParameters(10.0, 3.0, 5.0)
    exact = noisy_head.ridge(features, 2.0)
    run = {"regularization": 2.0, "epsilon": 1e8, "delta": 1e-5}
    iterated = noisy_head.fit(
        jax.random.key(0), features, hyper, step_size=2 / 13, steps=200, **run
    )
    # Multiplier √200/14142 = 1e-3, sensitivity 105 over 300 prompts: a stationary std near 1e-4.
    np.testing.assert_allclose(iterated.gamma, exact, atol=6e-4)
    one_shot = noisy_head.fit_one_shot(jax.random.key(0), features, hyper, **run)
    np.testing.assert_allclose(one_shot.gamma, exact, atol=6e-5)


def test_noise_has_the_stated_size():
    """One step from zero: Γ¹ = −η(gradient + noise), noise std = multiplier × sensitivity / N per entry."""
    features, hyper = features_of(50, 6, 3), noisy_head.HyperParameters(1.0, 0.5, 1e6)
    run = {"regularization": 1.0, "step_size": 0.5, "steps": 1}

    def draw(key):
        return noisy_head.fit(key, features, hyper, epsilon=1.0, delta=1e-5, **run).gamma

    gammas = np.array(jax.vmap(draw)(jax.random.split(jax.random.key(1), 4000)))
    exact = noisy_head.noisy_descent(
        jax.random.key(0), features, hyper, noise_multiplier=0.0, **run
    )
    noise = (gammas - np.array(exact)).reshape(4000, -1)
    std = 0.5 * gaussian_noise_multiplier(1.0, 1e-5) * noisy_head.gradient_sensitivity(hyper) / 50
    # 36,000 normals: relative standard error of the std 0.4 %, of the mean 0.5 % of it.
    np.testing.assert_allclose(noise.std(), std, rtol=0.015)
    assert abs(noise.mean()) < 0.02 * std
    correlation = np.corrcoef(noise.T) - np.eye(9)
    assert np.abs(correlation).max() < 0.08


def test_pair_symmetric_is_the_projection():
    noise = np.random.default_rng(0).normal(size=(3, 3, 3, 3))
    with jax.enable_x64(True):
        projected = np.array(pair_symmetric(jnp.array(noise))).reshape(3, 3, 3, 3)
        np.testing.assert_allclose(
            pair_symmetric(jnp.array(projected)).reshape(-1), projected.reshape(-1)
        )
    q, s = np.random.default_rng(1).normal(size=(2, 3))
    member = np.einsum("i,k,j,l->ikjl", q, s, q, s)
    np.testing.assert_allclose(np.sum((noise - projected) * member), 0, atol=1e-13)


def test_bounds_are_enforced_on_every_row():
    """Rows far outside, of zero, and non-finite (which only a jit lets through) all end within the bounds."""
    hyper = noisy_head.HyperParameters(1.0, 0.5, 2.0)
    rows = np.array(
        [[1e200, 1.0], [0.0, 0.0], [np.nan, 1.0], [1e-300, 0.0], [3.0, 4.0], [np.inf, 0.0]]
    )
    features = noisy_head.Features(
        rows, np.roll(rows, 1, axis=1) * 1e120, np.array([5, -9, 1, np.nan, 0.3, 1])
    )
    with jax.enable_x64(True):
        bounded = [
            np.array(part)
            for part in noisy_head.enforce(noisy_head.Features(*map(jnp.asarray, features)), hyper)
        ]
    query, context, target = bounded
    assert all(np.isfinite(part).all() for part in bounded)
    assert (
        np.linalg.norm(query, axis=1) * np.linalg.norm(context, axis=1) <= 0.5 * (1 + 1e-15)
    ).all()
    assert (np.abs(target) <= 1).all()
    np.testing.assert_allclose(
        np.outer(query[4], context[4]), 0.5 * np.outer([0.6, 0.8], [0.8, 0.6])
    )

    def release(target):
        return noisy_head.noisy_descent(
            jax.random.key(0), noisy_head.Features(features[0], features[1], target), hyper,
            regularization=1.0, step_size=0.5, steps=3, noise_multiplier=1.0,
        )  # fmt: skip

    with jax.enable_x64(True), np.errstate(all="ignore"):
        traced = jax.jit(lambda q, c, t: noisy_head.noisy_descent(
            jax.random.key(0), noisy_head.Features(q, c, t), hyper, regularization=1.0, step_size=0.5,
            steps=3, noise_multiplier=1.0))  # fmt: skip
        assert np.isfinite(traced(*features)).all()
    with pytest.raises(ValueError, match="not finite"):
        release(features.target)


def test_valid_rule():
    """No prompt beyond G or C but one in N, and R contains ridge for any data within C and G."""
    for length, dim, noise_std in ((63, 5, 0.0), (500, 5, 0.0), (31, 31, 0.0), (40, 3, 0.8)):
        features = noisy_head.sample_features(
            jax.random.key(2), 4000, length, dim, noise_std=noise_std
        )
        size = np.linalg.norm(features.query, axis=1) * np.linalg.norm(features.context, axis=1)
        C, G, _ = noisy_head.hyperparameters(
            400, length, dim, regularization=1.0, noise_std=noise_std
        )
        assert np.mean(size > G) <= 1 / 400
        assert np.mean(np.abs(features.target) > C) <= 1 / 400
    # At L = 500 the paper's G is below what most prompts have.
    long = noisy_head.sample_features(jax.random.key(2), 1000, 500, 5)
    printed = noisy_head.hyperparameters(5000, 500, 5, regularization=0.01, rule="paper")
    assert np.mean(np.linalg.norm(long.context, axis=1) > printed.feature_radius) > 0.5


@pytest.mark.parametrize("regularization", [1e-3, 0.3, 10.0])
def test_valid_radius_is_attained(regularization):
    C, G, R = noisy_head.hyperparameters(4, 10, 2, regularization=regularization)
    # All prompts alike, with ‖Z‖ = min(G, √λ) and targets C: the extreme case of the proof.
    size = min(G, math.sqrt(regularization))
    features = noisy_head.Features(
        np.tile([1.0, 0.0], (4, 1)), np.tile([0.0, size], (4, 1)), np.full(4, C)
    )
    found = np.linalg.norm(noisy_head.ridge(features, regularization))
    np.testing.assert_allclose(found, R, rtol=1e-9)


def test_paper_rule_is_4_1():
    C = math.sqrt(2 * 1.25 * math.log(1000 * 31 / 0.1))
    hyper = noisy_head.hyperparameters(
        1000, 31, 5, regularization=5.0, noise_std=0.5, kappa=0.1, rule="paper"
    )
    root = math.sqrt(math.log(10)) / 5
    np.testing.assert_allclose(
        hyper,
        [
            C,
            C / math.sqrt(31) * (1 + math.sqrt(math.log(1e4)) / 5),
            C**2 / 5 * math.sqrt(1000 / 31) * (1 + root),
        ],
    )


@pytest.mark.parametrize("accounting", ["basic", "zcdp", "gdp"])
def test_guarantee_is_what_the_noise_gives(accounting):
    features = features_of(40)
    fitted = noisy_head.fit(
        jax.random.key(0), features, HYPER, **SETTINGS, epsilon=1.0, accounting=accounting
    )
    guarantee = fitted.guarantee
    assert (guarantee.epsilon, guarantee.delta) == (1.0, 1e-5)
    assert guarantee.neighboring is REPLACE_ONE
    assert guarantee.unit == "prompt"
    exact = gaussian_epsilon(fitted.noise_multiplier, 1e-5, compositions=38)
    assert exact <= 1.0 + 1e-9
    np.testing.assert_allclose(Ledger().spend(guarantee, "fit").guarantee(1e-5).epsilon, exact)


def test_papers_noise_is_of_a_smaller_epsilon():
    multiplier, _ = noisy_head.calibrate(HYPER, **SETTINGS, epsilon=1.0, **PAPER)
    np.testing.assert_allclose(
        gaussian_epsilon(multiplier, 1e-5, compositions=38), 0.089, atol=1e-3
    )


def test_one_release_composes_as_one_gaussian():
    fitted = noisy_head.fit_one_shot(
        jax.random.key(0), features_of(40), HYPER, regularization=5.0, epsilon=0.7, delta=1e-6
    )
    assert fitted.guarantee.event == dp_accounting.GaussianDpEvent(fitted.noise_multiplier)
    mu = 1 / fitted.noise_multiplier
    delta = special.ndtr(mu / 2 - 0.7 / mu) - math.exp(0.7) * special.ndtr(-mu / 2 - 0.7 / mu)
    np.testing.assert_allclose(delta, 1e-6, rtol=1e-6)


def test_excess_risks_of_the_paper_and_of_the_release():
    """N = 4000, ε = 1, 40 trials: 0.036 as printed; the one-shot release is 20,000 times below."""
    sizes, run = (4000, 63, 5), {"regularization": 5.0}
    printed = noisy_head.hyperparameters(*sizes, **run, rule="paper")
    valid = noisy_head.hyperparameters(*sizes, **run)
    step_size = 3.17 / (5 + printed.feature_radius**2) ** 2
    steps = math.ceil(2.5 * math.log(4000) / -math.log1p(-5 * step_size))
    multiplier, _ = noisy_head.calibrate(
        printed, **run, step_size=step_size, steps=steps, epsilon=1.0, delta=1e-5, **PAPER
    )
    once = gaussian_noise_multiplier(1.0, 1e-5)

    def trial(key):
        features = noisy_head.sample_features(key, *sizes)
        gammas = (
            noisy_head.noisy_descent(
                key, features, printed, noise_multiplier=multiplier, step_size=step_size, steps=steps,
                sensitivity="paper", objective="paper", **run,
            ),
            noisy_head.one_shot(key, features, valid, noise_multiplier=once, **run),
            jnp.zeros((5, 5)),
        )  # fmt: skip
        reference = noisy_head.ridge(features, 5.0)
        return [noisy_head.population_risk(gamma, 63, reference=reference) for gamma in gammas]

    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 40)
        paper, one_shot, zero = np.mean(
            jax.jit(lambda keys: jax.lax.map(trial, keys))(keys), axis=1
        )
    # The risk of a trial scatters by a third, so the mean of 40 by 5 %.
    np.testing.assert_allclose(paper, 0.036, rtol=0.25)
    assert paper > 20_000 * one_shot
    np.testing.assert_allclose(zero, 2.8e-6, rtol=0.1)


def test_sphere_start_has_norm_R_and_is_no_function_of_the_data():
    run = {
        "regularization": 1.0,
        "step_size": 1e-12,
        "steps": 1,
        "noise_multiplier": 0.0,
        "init": "sphere",
    }
    hyper = noisy_head.HyperParameters(1.0, 1.0, 3.0)
    key = jax.random.key(5)
    first, second = (
        noisy_head.noisy_descent(key, features_of(20, seed=s), hyper, **run) for s in (0, 1)
    )
    np.testing.assert_allclose(np.linalg.norm(first), 3.0)
    np.testing.assert_allclose(first, second, atol=1e-10)
    other = noisy_head.noisy_descent(jax.random.key(6), features_of(20), hyper, **run)
    assert np.linalg.norm(np.array(first) - np.array(other)) > 1


def test_same_key_same_fit_under_vmap_and_jit():
    features = features_of(30)

    def fit(key):
        return noisy_head.fit(key, features, HYPER, **SETTINGS, epsilon=1.0).gamma

    keys = jax.random.split(jax.random.key(0), 3)
    each = np.stack([np.array(fit(key)) for key in keys])
    np.testing.assert_allclose(jax.vmap(fit)(keys), each, atol=1e-13)
    with pytest.raises(ValueError, match=r"jax\.enable_x64"):
        jax.jit(fit)(keys[0])
    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.jit(jax.vmap(fit))(keys), each, atol=1e-13)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epsilon": 0.0}, "epsilon=0"),
        ({"epsilon": math.nan}, "epsilon=nan"),
        ({"delta": 0.0}, "delta=0"),
        ({"delta": 1.0}, "delta=1"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"step_size": 0.0}, "step_size=0"),
        ({"step_size": 0.4}, "step_size=0.4 does not contract: use less than 0.305"),
        ({"step_size": 0.2, "objective": "paper"}, "less than 0.173"),
        ({"regularization": 0.0}, "regularization=0"),
        ({"accounting": "rdp"}, "accounting='rdp'"),
        ({"sensitivity": "loose"}, "sensitivity='loose'"),
        ({"objective": "lasso"}, "objective='lasso'"),
        ({"accounting": "basic", "epsilon": 38.0}, "classical Gaussian bound"),
        ({"accounting": "last_iterate", "trajectory": True}, "last iterate alone"),
        ({"init": "ones"}, "init='ones'"),
        ({"init": np.ones((4, 4))}, "init has shape"),
        ({"init": np.full((5, 5), 1e3)}, "outside the ball"),
        ({"init": np.full((5, 5), np.nan)}, "init holds values"),
        ({"hyper": noisy_head.HyperParameters(1.0, 0.0, 1.0)}, "hyper.feature_radius=0"),
        ({"features": features_of(5)._replace(target=np.ones(3))}, "features have shapes"),
        ({"features": features_of(5)._replace(target=np.full(5, np.nan))}, "features.target"),
    ],
)
def test_misuse(changed, message):
    arguments = {"features": features_of(5), "hyper": HYPER, **SETTINGS, "epsilon": 1.0, **changed}
    features, hyper = arguments.pop("features"), arguments.pop("hyper")
    with pytest.raises(ValueError, match=message):
        noisy_head.fit(jax.random.key(0), features, hyper, **arguments)


def test_one_shot_misuse():
    features = features_of(5)
    good = {"regularization": 1.0, "epsilon": 1.0, "delta": 1e-5}
    for name, value in (("regularization", 0.0), ("epsilon", -1.0), ("delta", 2.0)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            noisy_head.fit_one_shot(jax.random.key(0), features, HYPER, **{**good, name: value})
