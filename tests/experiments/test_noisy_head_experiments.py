"""Every variant of configs/noisy_head.py runs, says what it should, and refuses bad values."""

import importlib
import math

import numpy as np
import pytest

from configs.noisy_head import get_config
from dpx import noisy_head
from experiments.noisy_head import texts as noisy_head_text
from experiments.noisy_head.methods import make_cell, make_descent


def run(config, workdir):
    module = importlib.import_module(f"experiments.{config.experiment}")
    module.validate(config)
    return module.run(config, workdir)


@pytest.mark.slow
def test_what_a_simulation_measures(tmp_path):
    metrics = run(get_config("low_dim,tiny"), tmp_path).metrics
    place = "num_prompts=64/epsilon=1.0"
    assert metrics[f"{place}/one_shot/excess_risk"] < metrics[f"{place}/paper/excess_risk"]
    assert metrics[f"{place}/paper/excess_risk_se"] > 0
    assert metrics["num_prompts=64/zero/test_mse"] == 1.0
    assert metrics["num_prompts=64/ridge/excess_risk"] == 0.0
    metrics = run(get_config("rates,tiny"), tmp_path).metrics
    assert metrics["axis=length/claimed/exponent"] == -3.0
    assert -4 < metrics["axis=epsilon/paper/exponent"] < 1


@pytest.mark.slow
def test_a_reference_is_ridge_at_its_own_best_penalty(tmp_path):
    """What privacy costs is not measured against ridge at the λ that suits the private fits."""
    config = get_config("useful,tiny")
    config.axes.num_prompts, config.regularization, config.ridges = (4000,), 0.1, (0.1, 1e-3, 1e4)
    found = run(config, tmp_path).metrics
    at_once = {x: found[f"num_prompts=4000/{x}/test_mse"] for x in ("zero", "ridge", "best_ridge")}
    config.regularization = 1e-3
    alone = run(config, tmp_path).metrics["num_prompts=4000/ridge/test_mse"]
    assert at_once["best_ridge"] == pytest.approx(alone, rel=1e-6)
    assert alone < at_once["ridge"] < at_once["zero"]
    assert "num_prompts=4000/best_ridge/excess_risk" not in found


@pytest.mark.slow
def test_text(tmp_path):
    words = np.random.default_rng(0).choice(["red", "green", "blue", "cyan", "grey"], size=(80, 30))
    texts = tmp_path / "texts"
    texts.mkdir()
    for i, row in enumerate(words):
        (texts / f"{i:03}.txt").write_text(" ".join(row[: 3 + i % 25]))
    config = get_config("text,tiny")
    with pytest.raises(FileNotFoundError, match=r"data\.path"):
        noisy_head_text.validate(config)
    config.data.path = str(texts)
    config.noise_seed, config.comparisons = 3, True
    outcome = run(config, tmp_path / "run")
    assert "16 prompts to train on, 4 to test on" in outcome.notes
    assert any("documents" in words for words in outcome.headline.assumptions)
    assert set(outcome.releases) == RELEASED


RELEASED = {
    "one_shot",
    *(f"steps={steps}/{name}" for name in ("paper", "noisy_head") for steps in (2, 8)),
}


@pytest.fixture
def prompts():
    rng = np.random.default_rng(1)
    return rng.normal(size=(30, 4, 5)), rng.uniform(-1, 1, (30, 4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npz", "npy", "csv"])
def test_own_prompts(tmp_path, prompts, kind):
    config = get_config("text,tiny")  # L = 3
    path = tmp_path / f"prompts.{kind}"
    x, y = prompts
    together = np.concatenate([x, y[..., None]], axis=2)
    if kind == "npz":
        np.savez(path, x=x, y=y)
    elif kind == "npy":
        np.save(path, together)
    else:
        config.data.source = "arrays"
        np.savetxt(path, together.reshape(-1, 6), delimiter=",", header="a,b,c,d,e,y", comments="")
    config.data.path = str(path)
    train, test = noisy_head_text.read(config)
    found = np.concatenate([test.x, train.x])
    assert sorted(found[:, 0, 0]) == pytest.approx(sorted(x[:, 0, 0]))
    assert (train.x.shape, train.y.shape, len(test.x)) == ((24, 4, 5), (24, 4), 6)
    index = np.argmin(np.abs(x[:, 0, 0] - train.x[0, 0, 0]))
    np.testing.assert_allclose(train.y[0], y[index], rtol=1e-12)
    if kind == "npz":
        outcome = run(config, tmp_path / "run")
        assert (tmp_path / "run" / "secret" / "keys.json").exists()
        assert set(outcome.releases) == {"steps=8/noisy_head"}  # one, for the whole budget
        assert not any("documents" in words for words in outcome.headline.assumptions)


def test_tables_that_are_no_prompts_are_named(tmp_path):
    path = tmp_path / "numbers.csv"
    path.write_text("1,2,9\n" * 6)
    config = get_config("text,tiny")
    config.data.path, config.data.column = str(path), "1"
    with pytest.raises(ValueError, match=r"holds no word: .* --config.data.source=arrays"):
        noisy_head_text.read(config)


def test_settings_are_the_papers():
    config = get_config("low_dim")
    cell = make_cell(config, num_prompts=1000)
    descent = make_descent("paper", config, cell)
    G = descent.hyper.feature_radius
    assert cell == (1000, 31, 5, 5.0, 0.0)
    np.testing.assert_allclose(descent.step_size, 3.17 / (5 + G**2) ** 2)
    assert descent.steps == 38
    config = get_config("high_dim")
    cell = make_cell(config, num_prompts=900)
    descent = make_descent("paper", config, cell)
    N, D, G = 900, 30, descent.hyper.feature_radius
    assert cell == (900, 30, 30, 30.0, 0.0)
    np.testing.assert_allclose(descent.step_size, 0.07 * N * D / (N + D * G**2) ** 2)
    assert descent.steps == 5
    config = get_config("early_stopping")
    cell = make_cell(config, num_prompts=1000)
    descent = make_descent("paper", config, cell, steps=20)
    rate, G = 1000 / 31, descent.hyper.feature_radius
    np.testing.assert_allclose(descent.step_size, 0.02 * rate / (3 * (rate + G**2) ** 2))
    config = get_config("robustness")
    cell = make_cell(config, num_prompts=5000)
    descent = make_descent("paper", config, cell)
    G = descent.hyper.feature_radius
    np.testing.assert_allclose(descent.step_size, 0.007 / (0.01 + G**2) ** 2)
    assert descent.steps == math.ceil(math.log(5000))


@pytest.mark.slow
def test_the_best_ridge_predicts_training_prompts_that_it_was_not_fitted_to():
    """Tokens that say nothing of y: the largest λ is best, whatever the config has."""
    config, rng = get_config("text,tiny"), np.random.default_rng(0)
    x, y = rng.normal(size=(40, 6, 5)), rng.normal(size=(40, 6))
    train = noisy_head.Prompts(x, y)
    found = noisy_head_text._best_ridge(train, config)
    largest = config.regularization * max(noisy_head_text.TRIED)
    expected = noisy_head.ridge(noisy_head.featurize(train), largest)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
