"""The gram configs: tiny runs on the full code path, figures, bad values."""

import numpy as np
import pytest
from all_configs import configured, executed

from configs import gram as configs
from dpx import gram as dpx_gram
from dpx import privacy
from experiments.dp_transformer import histories as recommender_data
from experiments.gram import attention_error as gram
from experiments.gram import one_release as item_recommender
from experiments.gram import own_matrix


@pytest.mark.slow
def test_the_error_experiment_runs_draws_and_ranks_the_mechanisms(tmp_path):
    errors = []
    for epsilon in (0.5, 5.0):
        config = configs.get_config("tiny")
        config.epsilon = epsilon
        gram.validate(config)
        outcome = gram.run(config, tmp_path)
        metrics = outcome.metrics
        assert metrics["gaussian/max_entry_error"] < metrics["sampling/max_entry_error"]
        assert metrics["sampling/max_entry_error"] < metrics["uniform/max_entry_error"]
        assert metrics["gaussian/max_entry_error"] < metrics["gaussian/bound"]
        assert metrics["uniform/bound"] < metrics["gaussian/bound_paper"]
        errors.append(metrics["gaussian/max_entry_error"])
        # Every private row has an ε; of the loose count no matrix is released, so the total leaves it out.
        assert {measure.row for measure in outcome.measures} == {*outcome.releases, "uniform"}
        assert set(outcome.releases) - set(outcome.composed) == {"sampling_loose"}
        # What was planned is what was drawn, and what the errors are those of.
        planned = gram.plan(config).parameters
        for row in ("sampling", "sampling_paper"):
            if row in outcome.releases:
                count = planned[f"{row}/num_samples"]
                assert metrics[f"{row}/num_samples"] == count
                assert f"mean of {count} Gaussian" in outcome.releases[row].mechanism
    assert errors[1] < errors[0]


def test_the_columns_have_the_stated_law_and_none_is_clipped():
    config = configs.get_config()
    config.update({"rows": 6, "columns": 300_000, "latent_dim": 3, "slack": 1.5})
    X = gram._columns(config).astype(np.float64)
    matrix = X @ X.T
    # Both this matrix and the one that sets its scale are means over 2^18 columns or more.
    np.testing.assert_allclose(np.abs(matrix).max(), 0.09, rtol=0.02)
    assert np.linalg.matrix_rank(matrix, tol=1e-6) == 3
    lengths = np.linalg.norm(X, axis=0)
    np.testing.assert_allclose(
        1.5 * lengths, gram.plan(config).parameters["column_bound"], rtol=1e-5
    )


def test_the_counts_of_samples_belong_to_their_bounds_on_the_change():
    config = configs.get_config()
    planned, terms = gram.plan(config).parameters, {"n": 8}
    column_bound, eta = planned["column_bound"], planned["eta"]
    assert planned["max_column_change"] == 2 * column_bound
    for label, change in (
        ("sampling", 2**0.5 * column_bound**2),
        ("sampling_loose", 4 * column_bound**2),
    ):
        # A bound of unit columns with the same t = F/η.
        same = dpx_gram.max_samples(
            config.epsilon,
            config.delta,
            column_bound=1.0,
            max_column_change=2.0,
            eta=2**0.5 * eta / change,
            **terms,
        )
        assert planned[f"{label}/num_samples"] == pytest.approx(same, rel=1e-6)


@pytest.fixture
def table(tmp_path):
    X = np.random.default_rng(3).uniform(-1, 1, (3, 4000))
    np.savetxt(tmp_path / "X.csv", X.T, delimiter=",", header="a,b,c", comments="")
    np.save(tmp_path / "X.npy", X.astype(np.float32))
    np.savez(tmp_path / "X.npz", X=X, other=X)
    return X


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("X.csv", {"data.transpose": True}),
        ("X.npy", {"max_column_change": 0.5}),
        ("X.npz", {"data.array": "X", "neighboring": "add_or_remove_one"}),
    ],
)
def test_an_own_matrix_is_released_saved_and_loaded(tmp_path, table, file, changed):
    config = configs.get_config("table,tiny")
    config.data.path, config.column_bound = str(tmp_path / file), 3.0**0.5
    config.update_from_flattened_dict(changed)
    workdir = tmp_path / "run"
    own_matrix.validate(config)
    planned = own_matrix.plan(config).parameters
    outcome = own_matrix.run(config, workdir)
    # The noise comes from secret keys, which the launcher deletes when the result stands.
    assert not outcome.synthetic
    assert (workdir / "secret" / "keys.json").exists()
    made = own_matrix.load(config, workdir)
    assert made.noise_std == planned["noise_std"]
    assert made.guarantee == outcome.headline
    assert np.abs(made.matrix - table @ table.T).max() <= planned["entry_error_bound"]
    assert (made.guarantee.epsilon, made.guarantee.delta) == (1.0, 1e-6)
    assert made.guarantee.neighboring.name.lower() == config.neighboring
    exact, released = (dpx_gram.attention(A) for A in (table @ table.T, made.matrix))
    metrics = outcome.metrics
    assert np.abs(exact - released).max() <= metrics["gaussian/attention_error_bound"]
    assert np.abs(exact - 1 / 3).max() <= metrics["uniform/attention_error_bound"]


@pytest.mark.slow
def test_the_gaussian_release_is_fifty_times_more_accurate_than_the_papers(tmp_path):
    metrics = gram.run(configs.get_config(), tmp_path).metrics
    gaussian = metrics["gaussian/max_entry_error"]
    assert metrics["sampling_paper/max_entry_error"] > 50 * gaussian
    # An independent implementation with another X: its spread between X's is about 10 %.
    assert gaussian == pytest.approx(2.6e-5, rel=0.2)
    for label, error in (("sampling", 4.9e-5), ("sampling_loose", 1.4e-4), ("uniform", 1.24e-2)):
        assert metrics[f"{label}/max_entry_error"] == pytest.approx(error, rel=0.2), label


@pytest.mark.slow
def test_rows_that_read_one_release_count_once(tmp_path):
    source = "gram:recommender,tiny"
    config = configured(source, tmp_path)
    released = executed(config, source, tmp_path / "run").private
    # The text form of the ratings is a 5-core, whatever the config says.
    for spent in (*released["releases"].values(), released["total"]):
        assert recommender_data.K_CORE in spent["assumptions"]
    assert released["releases"]["attention"] == released["releases"]["ease"]
    once = {label: x for label, x in released["releases"].items() if "attention" not in label}
    counted = released["total"]["event"].count("GaussianDpEvent")
    assert counted == sum(x["event"].count("GaussianDpEvent") for x in once.values())
    fixed = released["releases"]["ease_fixed"]
    assert 0.85 * config.epsilon < fixed["epsilon"] < config.epsilon
    assert fixed["delta"] == config.delta


def test_the_fixed_row_splits_its_budget_by_basic_composition():
    config = configs.get_config("recommender")
    spent = item_recommender.fixed_budget(config)
    together = privacy.gaussian_noise_multiplier(spent["epsilon"], spent["delta"])
    share, half = spent["popularity_budget_fraction"], config.delta / 2
    parts = {0.05: together / share**0.5, 0.95: together / (1 - share) ** 0.5}
    for part, multiplier in parts.items():
        assert privacy.gaussian_epsilon(multiplier, half) == pytest.approx(part * 8.0, rel=1e-6)
