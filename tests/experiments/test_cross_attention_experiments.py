"""The cross-attention configs run tiny, draw their figures, and refuse what no run could use."""

import types

import jax
import numpy as np
import pytest

from configs import cross_attention as config_file
from experiments.cross_attention import kernel_regression
from experiments.cross_attention import query_error as cross_attention

MODULES = {
    "cross_attention.query_error": cross_attention,
    "cross_attention.kernel_regression": kernel_regression,
}


@pytest.mark.parametrize("variant", ["size", "diamonds"])
def test_tiny_runs_report_errors_and_guarantees(variant, tmp_path):
    config = config_file.get_config(f"{variant},tiny")
    config.noise_seed = 0
    module = MODULES[config.experiment]
    module.validate(config)
    assert module.plan(config)["noise_multiplier"] > 0
    outcome = module.run(config, tmp_path)
    assert all(np.isfinite(value) for value in outcome.metrics.values())
    assert outcome.headline.epsilon == config.epsilon
    assert {"sketch", "dp_mean"} <= set(outcome.releases)
    record = types.SimpleNamespace(
        config=config.to_dict(), overrides={}, metrics=outcome.metrics, workdir=tmp_path
    )
    other = types.SimpleNamespace(
        config={**config.to_dict(), "epsilon": 2.0},
        overrides={},
        metrics=outcome.metrics,
        workdir=tmp_path,
    )
    drawn = module.figures([record, other], tmp_path)
    assert drawn
    assert all(path.is_file() for path in drawn)


def test_crossing_is_where_the_lines_meet():
    x = [1.0, 10.0, 100.0]
    assert cross_attention.crossing(x, [1.0, 0.1, 0.01], [0.1, 0.1, 0.1]) == pytest.approx(10)
    assert cross_attention.crossing(x, [1.0, 1.0, 1.0], [0.1, 0.1, 0.1]) is None
    assert cross_attention.crossing(x, [0.01, 1.0, 1.0], [0.1, 0.1, 0.1]) == 1.0


def test_regression_without_noise_is_least_squares():
    rng = np.random.default_rng(0)

    x = np.column_stack([np.ones(400), rng.uniform(-1, 1, (400, 2))])
    y = x @ [0.1, 0.3, -0.2] + 0.1 * rng.uniform(-1, 1, 400)
    got, _ = kernel_regression.private_regression(
        jax.random.key(0), x, y, regularization=0.0, epsilon=1e8, delta=1e-6
    )
    np.testing.assert_allclose(got, np.linalg.lstsq(x, y, rcond=None)[0], atol=1e-4)


def test_regression_sensitivity_is_never_exceeded():
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(5000):
        a, b = rng.choice([-1.0, 1.0], (2, 5)) * rng.choice([1.0, rng.random()], (2, 5))
        worst = max(worst, np.linalg.norm(np.outer(a, a) - np.outer(b, b)))
    assert 0.9 * np.sqrt(2) * 5 < worst <= np.sqrt(2) * 5 + 1e-12


@pytest.mark.parametrize(
    ("variant", "key", "value"),
    [
        ("size", "data.n", 1),
        ("size", "data.key_bound", 0.0),
        ("size", "degrees", (3,)),
        ("size", "trials", 0),
        ("diamonds", "kernel.degree", 3),
        ("diamonds", "kernel.largest_logit", -1.0),
    ],
)
def test_bad_values_are_refused(variant, key, value):
    config = config_file.get_config(f"{variant},tiny")
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=r"config\."):
        MODULES[config.experiment].validate(config)


@pytest.mark.parametrize("variant", config_file.VARIANTS)
def test_every_swept_key_exists(variant):
    flat = config_file.get_config(variant).to_dict()
    for key in config_file.sweep(variant):
        node = flat
        for part in key.split("."):
            node = node[part]
