"""Every variant of configs/noisy_head.py runs, says what it should, and refuses bad values."""

import importlib
import math
from types import SimpleNamespace

import numpy as np
import pytest

from configs.noisy_head import VARIANTS, get_config, sweep
from experiments.noisy_head import early_stopping as noisy_head_stopping
from experiments.noisy_head import excess_risk as noisy_head
from experiments.noisy_head import texts as noisy_head_text


def run(config, workdir):
    module = importlib.import_module(f"experiments.{config.experiment}")
    module.validate(config)
    assert module.plan(config)
    outcome = module.run(config, workdir)
    assert all(np.isfinite(value) for value in outcome.metrics.values())
    assert outcome.headline.epsilon == config.epsilon
    assert outcome.releases
    record = SimpleNamespace(config=config.to_dict(), metrics=outcome.metrics, workdir=workdir)
    assert all(path.stat().st_size > 1000 for path in module.figures([record], workdir))
    return outcome


@pytest.mark.parametrize("variant", VARIANTS)
def test_sweeps_name_real_keys(variant):
    config = get_config(variant)
    for key, values in sweep(variant).items():
        for value in values:
            config.update_from_flattened_dict({key: value})


def test_low_dim(tmp_path):
    metrics = run(get_config("low_dim,tiny"), tmp_path).metrics
    place = "num_prompts64/epsilon1"
    assert metrics[f"{place}/one_shot/excess_risk"] < metrics[f"{place}/paper/excess_risk"]
    assert metrics["num_prompts64/zero/test_mse"] == 1.0
    assert metrics["num_prompts64/ridge/excess_risk"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["high_dim", "useful", "rates", "early_stopping", "robustness"])
def test_other_variants(variant, tmp_path):
    metrics = run(get_config(f"{variant},tiny"), tmp_path).metrics
    if variant == "rates":
        assert metrics["slope/length/claimed"] == -3.0
        assert -4 < metrics["slope/epsilon/paper"] < 1


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
    config.noise_seed = 3
    outcome = run(config, tmp_path)
    assert outcome.metrics["train_prompts"] == 16
    assert set(outcome.releases) == {
        "one_shot", *(f"{name}, T={steps}" for name in ("paper", "noisy_head") for steps in (2, 8)),
    }  # fmt: skip


def test_settings_are_the_papers():
    config = get_config("low_dim")
    cell = noisy_head.make_cell(config, num_prompts=1000)
    method = noisy_head.make_method("paper", config, cell)
    G = method.hyper.feature_radius
    assert cell == (1000, 31, 5, 5.0, 0.0)
    np.testing.assert_allclose(method.options["step_size"], 3.17 / (5 + G**2) ** 2)
    assert method.options["steps"] == 38
    config = get_config("high_dim")
    cell = noisy_head.make_cell(config, num_prompts=900)
    method = noisy_head.make_method("paper", config, cell)
    N, D, G = 900, 30, method.hyper.feature_radius
    assert cell == (900, 30, 30, 30.0, 0.0)
    np.testing.assert_allclose(method.options["step_size"], 0.07 * N * D / (N + D * G**2) ** 2)
    assert method.options["steps"] == 5
    config = get_config("early_stopping")
    method = noisy_head_stopping.at_steps("paper", config, 20)
    rate, G = 1000 / 31, method.hyper.feature_radius
    np.testing.assert_allclose(method.options["step_size"], 0.02 * rate / (3 * (rate + G**2) ** 2))
    config = get_config("robustness")
    cell = noisy_head.make_cell(config, num_prompts=5000)
    method = noisy_head.make_method("paper", config, cell)
    G = method.hyper.feature_radius
    np.testing.assert_allclose(method.options["step_size"], 0.007 / (0.01 + G**2) ** 2)
    assert method.options["steps"] == math.ceil(math.log(5000))


@pytest.mark.parametrize(
    ("variant", "key", "value", "message"),
    [
        ("low_dim", "epsilon", -1.0, "epsilon=-1"),
        ("low_dim", "delta", 0.0, "delta=0"),
        ("low_dim", "trials", 0, "trials=0"),
        ("low_dim", "regularization", -5.0, "regularization=-5"),
        ("low_dim", "dim", 0, "dim=0"),
        ("low_dim", "methods", ("foo",), "'foo'"),
        ("useful", "axes.num_prompts", (0,), r"axes\.num_prompts"),
        ("early_stopping", "inits", ("foo",), "'foo'"),
        ("early_stopping", "methods", (), "methods"),
        ("early_stopping", "steps_grid", (0, 20), "steps_grid"),
        ("early_stopping", "steps_grid", (), "steps_grid"),
        ("robustness", "methods", (), "methods"),
        ("robustness", "powers", (), "powers"),
        ("high_dim", "epsilon", 5.0, "classical Gaussian bound"),
        ("robustness", "where", "labels", "where='labels'"),
        ("text", "test_fraction", 1.0, "test_fraction=1"),
        ("text", "data.source", "web", "data.source='web'"),
    ],
)
def test_misuse(variant, key, value, message, tmp_path):
    config = get_config(variant)
    if variant == "text":
        config.data.path = str(tmp_path)
    config.update_from_flattened_dict({key: value})
    module = importlib.import_module(f"experiments.{config.experiment}")
    with pytest.raises(ValueError, match=message):
        module.validate(config)
