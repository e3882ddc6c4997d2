"""The experiments that use Re-Attention, run tiny, and their configs' misuse."""

import jax
import numpy as np
import pytest
from all_configs import executed

from configs.shakespeare import get_config as shakespeare_config
from dpx.data import Histories, shakespeare
from dpx.reattention import ParameterNoise
from dpx.runs import records
from experiments.dp_transformer import models


def config_of(source, **changes):
    config = records.load_config(source)
    config.update(changes)
    return config


def execute(source, workdir, **changes):
    config = config_of(source, **changes)
    return executed(config, source, workdir)


def test_windows_do_not_overlap_and_cover_the_text(tmp_path):
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n"
    windows = shakespeare.encode(text, 7)
    assert "".join(shakespeare.decode(windows.tokens)) == text[: len(text) // 7 * 7]
    assert windows.mask.all()
    train, test = shakespeare.split_windows(windows, 3)
    assert shakespeare.decode(train.tokens) + shakespeare.decode(test.tokens) == shakespeare.decode(
        windows.tokens
    )
    path = tmp_path / "text.txt"
    path.write_text(text)
    assert shakespeare.load_shakespeare(path) == text
    with pytest.raises(FileNotFoundError):
        shakespeare.load_shakespeare(tmp_path / "none.txt")
    with pytest.raises(ValueError, match="line 2: '@'"):
        shakespeare.encode("a\nb@c\n", 2)
    with pytest.raises(ValueError, match="length"):
        shakespeare.encode("abc", 4)
    with pytest.raises(ValueError, match="held_out"):
        shakespeare.split_windows(windows, len(windows))


@pytest.mark.slow
def test_language_model_has_both_rows_at_one_budget_and_loads(tmp_path):
    record = execute("configs/shakespeare.py:tiny", tmp_path / "run")
    assert "dp_reattention/train_nats_per_character" in record.metrics
    for row in ("dp_transformer", "dp_reattention"):
        assert 0.995 * 8 < record.releases[row]["epsilon"] <= 8
        assert record.releases[row]["unit"] == "window"
    assert "token probabilities" in str(record.releases["dp_reattention"])
    model = records.load(tmp_path / "run")
    scored = model.log_prob(["to be or not to "])
    assert scored.shape == (1,)
    assert scored[0] < 0
    with pytest.raises(ValueError, match="pass 16 in each"):
        model.log_prob(["to be or not to ", "to be"])


@pytest.mark.slow
def test_recommender_adds_a_row_and_trains_recurrent_baselines(tmp_path):
    source = "configs/recommender.py:synthetic,tiny"
    record = execute(source, tmp_path / "a", reattention={"enabled": True}, num_seeds=1)
    assert "dp_reattention/ndcg@10" in record.metrics
    assert 0.995 * 8 < record.releases["dp_reattention"]["epsilon"] <= 8
    assert len(records.load(tmp_path / "a").recommend([1, 2], exclude_seen=False)) == 10
    record = execute(source, tmp_path / "b", model={"kind": "gru"}, num_seeds=1)
    assert {"dp_gru/ndcg@10", "gru/ndcg@10"} <= record.metrics.keys()


@pytest.mark.slow
def test_distraction_is_measured_and_drawn(tmp_path):
    record = execute("configs/reattention.py:tiny", tmp_path / "run")
    metrics = record.metrics
    assert metrics["std=1.0/relu/analytic_variance"] == pytest.approx(0.3408, rel=1e-3)
    assert metrics["std=1.0/gelu/sampled_variance"] == pytest.approx(0.3456, rel=0.2)
    assert metrics["logit_variance=0.0/one_key/plain"] == pytest.approx(1)
    at = "logit_variance=2.0/one_key"
    assert metrics[f"{at}/plain"] > 1.2 * metrics[f"{at}/reattention"]
    # On other devices it is the same run.
    assert execute("configs/reattention.py:tiny", tmp_path / "run", mesh={"data": 1}) == record


@pytest.mark.slow
def test_the_literal_form_serves_both_rows():
    config = config_of("configs/shakespeare.py:tiny", reattention={"renormalize": False})
    usual = models.build(config_of("configs/shakespeare.py:tiny"), 65, 16, 0)
    literal = models.build(config, 65, 16, 0)
    tokens = np.arange(16)
    noise_std = ParameterNoise(np.full(65, 0.1), 0.01)
    np.testing.assert_allclose(literal(tokens), usual(tokens), atol=1e-5)
    difference = literal(tokens, noise_std=noise_std) - usual(tokens, noise_std=noise_std)
    assert np.abs(difference).max() > 1e-5


def test_public_probabilities_are_read_and_checked(tmp_path):
    path = tmp_path / "p.txt"
    np.savetxt(path, np.linspace(0, 1, 65))
    config = shakespeare_config("tiny")
    config.update({"reattention": {"probabilities": "public", "path": str(path)}})
    models.check(config, 65)
    histories = Histories(tuple(np.arange(5) for _ in range(300)), 65)
    settings = {"prior": None, "unit": "window", "assumptions": ("another",)}
    found = models.calibrate(config, histories, 16, correction_key=jax.random.key(0), **settings)
    for spent in (found.guarantee, found.alone):
        assert "the token probabilities of config.reattention.path are public" in spent.assumptions
        assert "another" in spent.assumptions
    with pytest.raises(ValueError, match="64 probabilities"):
        models.check(config, 64)
    np.savetxt(path, np.linspace(0, 2, 65))
    with pytest.raises(ValueError, match="65 probabilities"):
        models.check(config, 65)
    config.reattention.path = str(tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError):
        models.check(config, 65)
