"""What experiments tell a selection: the price of the model that a run saves, and what a record changes."""

import jax.numpy as jnp
import numpy as np
import pytest
from command_line import call
from ml_collections import ConfigDict

from dpx.runs import records
from experiments.dp_transformer import (
    ranking,
    recommender,
    record_probability,
)

SOURCE = "configs/recommender.py:synthetic,tiny"


def test_a_candidate_has_one_model():
    with pytest.raises(ValueError, match=r"--config\.num_seeds=1"):
        recommender.candidate(records.load_config(SOURCE))


@pytest.mark.filterwarnings("error:key can be guessed")
@pytest.mark.parametrize("source", ["text:tiny", SOURCE])
def test_a_candidate_is_planned_without_a_key_that_can_be_guessed(source):
    config = records.load_config(source)
    if "num_seeds" in config:
        config.num_seeds = 1
    assert records.experiment(config).candidate(config).sensitivities


@pytest.mark.slow
def test_no_user_moves_a_metric_by_more_than_is_declared():
    """Takes each of 700 users away, and with each the sum over users, divided by their public number."""
    rng = np.random.default_rng(0)
    count, items = 700, 30
    config = ConfigDict({"evaluate": {"k": 10, "exclude_seen": True}})
    model, seen = rng.normal(size=(count, items)), rng.integers(0, items, (count, 4))
    held_out = rng.integers(0, items, count)
    model[5] = np.nan  # the worst that a model can say of a user
    model[6, held_out[6]] = 1e9

    shapes = set()  # in products of several shapes a user's scores are rounded in several ways

    def by_user(users):
        def score(rows):
            shapes.add(rows.shape)
            return jnp.asarray(model[users][rows])

        return ranking.by_user(config, seen[users], held_out[users], score)

    def measured(users):
        found = ranking.means(by_user(users))
        return {name: value * len(users) / count for name, value in found.items()}

    everybody = np.arange(count)
    own, whole = by_user(everybody), measured(everybody)
    most = ranking.sensitivities(config, count)
    for user in (0, 5, 6, *rng.integers(0, count, 20)):
        for name, value in measured(np.delete(everybody, user)).items():
            moved = whole[name] - value
            assert moved == pytest.approx(own[name][user] / count, abs=1e-12)
            assert -1e-12 <= moved <= most[name]
    assert len(shapes) == 1
    for name, values in own.items():
        assert values[5] == 0
        assert values[6] == pytest.approx(1)
        assert 0.9 / count < values[6] / count <= most[name]


@pytest.mark.slow
def test_the_recommender_that_is_selected_recommends(tmp_path):
    axes = ("num_seeds=1", "non_private.steps=0", "train.learning_rate=1e-3,1e-2")
    ended = call(
        "sweep",
        f"--config={SOURCE}",
        f"--workdir={tmp_path}",
        *(f"--set={axis}" for axis in axes),
        "--select=hit@10",
        "--trials=geometric:2",
        "--workers=2",
    )
    assert ended.returncode == 0, ended.stderr
    (record,) = records.read_all(tmp_path)
    assert record.workdir.name == "selected"
    assert set(record.metrics) == {"served/hit@10"}
    trained = [records.load(path.parent) for path in tmp_path.rglob("private_trials/*/result.json")]
    chosen = records.load(tmp_path / "selected").recommend([1, 2], k=20, exclude_seen=False)
    assert chosen in [one.recommend([1, 2], k=20, exclude_seen=False) for one in trained]


def test_the_score_of_texts_is_a_number_whatever_a_model_says():
    """A record of no token is certain, and one that is not a number is certainly absent."""
    found = record_probability.score(np.array([0.0, -2.0, np.nan]), np.array([0, 2, 1]))
    np.testing.assert_allclose(found, (1 + np.exp(-1)) / 3)
