"""The table of samplings has the noise that a run of each config would have."""

import importlib

import pytest

from experiments.dp_transformer import samplings


@pytest.mark.quick_cases(
    "classify:tiny-poisson", "recommender:synthetic,tiny-poisson", "classify:tiny-allocation"
)
@pytest.mark.parametrize("sampling", ["poisson", "allocation"])
@pytest.mark.parametrize(
    "name", ["quickstart:tiny", "recommender:synthetic,tiny", "classify:tiny", "finetune:tiny"]
)
def test_a_row_has_the_noise_of_a_dry_run(name, sampling):
    training = samplings.Training("", name, 0, ())
    config = samplings.load(training)
    config.train.sampling = sampling
    experiment = importlib.import_module(f"experiments.{config.experiment}")
    about = experiment.plan(config).parameters
    found = samplings.noise(training._replace(records=about["records"]), config, sampling)
    assert found == pytest.approx(about["noise_multiplier"], rel=1e-9)


def test_every_training_of_the_table_can_be_loaded():
    for training in samplings.TRAININGS:
        section = samplings.load(training)[training.section]
        assert 0 < section.batch_size <= training.records
