"""What `dpx recommend` serves: the better of a model and its start, by a comparison that is paid for."""

import math

import jax
import numpy as np
import pytest
from all_configs import executed

import dpx
from dpx.runs import records
from experiments.dp_transformer import choice, recommender_rows

SOURCE = "configs/recommender.py:synthetic,tiny"


def tiny(**changes):
    config = records.load_config(SOURCE)
    config.update_from_flattened_dict({"num_seeds": 1, "non_private.steps": 0} | changes)
    return config


def _any():
    return dpx.PrivacyGuarantee(1.0, 1e-5, dpx.privacy.ADD_OR_REMOVE_ONE, "user", "prior")


@pytest.mark.slow
def test_without_noise_the_lead_is_the_sum_of_differences():
    config = tiny(epsilon=1e6)
    trained, start = np.random.default_rng(0).random((2, 100))
    found = choice.lead(jax.random.key(0), config, trained, start)
    assert found == pytest.approx(math.fsum(trained - start), abs=0.1)
    # A quarter of μ² is half of μ.
    whole = dpx.gaussian_noise_multiplier(config.epsilon, config.delta)
    config.choice_budget_fraction = 0.25
    assert choice.noise_std(config) == pytest.approx(2 * whole)


def test_nothing_is_chosen_or_paid_without_a_prior_or_a_share():
    assert choice.guarantee(tiny(), None, "user", ()) is None
    assert choice.guarantee(tiny(choice_budget_fraction=0.0), _any(), "user", ()) is None


@pytest.mark.slow
def test_a_model_that_training_made_worse_is_not_served(tmp_path):
    """A learning rate of 1e3 makes every model worse than the popularity that it starts from."""
    changes = {"train.learning_rate": 1e3, "popularity_budget_fraction": 0.6, "noise_seed": 1}
    changes |= {"choice_budget_fraction": 0.3, "epsilon": 1e3}
    made = {}
    for steps in (4, 1):
        config = tiny(**changes, **{"train.steps": steps, "train.warmup": 0.0})
        made[steps] = executed(config, SOURCE, tmp_path / str(steps))
    record = made[4]
    metrics = {
        row: record.metrics[f"{row}/ndcg@10"] for row in ("start", "dp_transformer", "served")
    }
    assert metrics["dp_transformer"] < metrics["start"] == metrics["served"]
    assert "`dpx recommend` serves the release that training started from" in record.notes
    # What is loaded is where training began: the same after any number of steps.
    everybody = [
        records.load(tmp_path / name).recommend([], 20, exclude_seen=False) for name in ("4", "1")
    ]
    assert everybody[0] == everybody[1]


@pytest.mark.slow
def test_a_model_that_training_made_better_is_served(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(recommender_rows, "_save", lambda *given: saved.append(given[2]))
    config = tiny(**{"data.num_users": 400, "train.steps": 60, "train.batch_size": 100})
    config.train.learning_rate, config.epsilon, config.noise_seed = 1e-2, 100.0, 1
    record = executed(config, SOURCE, tmp_path / "run")
    metrics = {
        row: record.metrics[f"{row}/ndcg@10"] for row in ("start", "dp_transformer", "served")
    }
    assert metrics["start"] < metrics["dp_transformer"] == metrics["served"]
    assert "`dpx recommend` serves the trained model" in record.notes
    assert len(saved) == 1
    # The choice costs the budget of both rows, and counts once in the total.
    assert record.releases["served"]["event"] == record.releases["dp_transformer"]["event"]
    assert record.total["event"].count("GaussianDpEvent") == 4
