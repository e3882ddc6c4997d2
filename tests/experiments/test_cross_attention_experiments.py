"""The cross-attention configs run tiny, draw their figures, and refuse what no run could use."""

import types

import jax
import numpy as np
import own_files
import pytest

from configs import cross_attention as config_file
from dpx.privacy import gaussian_noise_multiplier
from dpx.runs import comparison
from dpx.training import log
from experiments.cross_attention import (
    classifiers,
    kernel_regression,
    labelled,
    retrieval,
    table,
    votes,
)


@pytest.mark.slow
def test_regression_without_noise_is_least_squares():
    rng = np.random.default_rng(0)

    x = np.column_stack([np.ones(400), rng.uniform(-1, 1, (400, 2))])
    y = x @ [0.1, 0.3, -0.2] + 0.1 * rng.uniform(-1, 1, 400)
    got, _ = kernel_regression.private_regression(
        jax.random.key(0), x, y, regularization=0.0, epsilon=1e8, delta=1e-6
    )
    np.testing.assert_allclose(got, np.linalg.lstsq(x, y, rcond=None)[0], atol=1e-4)


# ---------------------------------------------------------------------------------------------------------
# Memories of one's own


def own_memory(folder):
    rng = np.random.default_rng(0)
    np.savez(folder / "memory.npz", K=rng.random((200, 2)), V=rng.uniform(-1, 1, 200))
    return folder / "memory.npz"


def own_config(path, **changes):
    config = config_file.get_config("table,tiny")
    values = {"data.path": str(path), "key_bound": 1.0, "value_bound": 1.0, "noise_seed": 3}
    config.update_from_flattened_dict({**values, "epsilon": 1e6, **changes})
    return config


@pytest.mark.slow
@pytest.mark.parametrize("domain", ["box", "ball"])
def test_own_memory_is_released_saved_and_loaded_without_its_file(domain, tmp_path):
    path, workdir = own_memory(tmp_path), tmp_path / "run"
    config = own_config(path, domain=domain, features="taylor", temperature=2.0)
    assert table.plan(config).parameters["features"] > 1
    outcome = table.run(config, workdir)
    errors = {measure.row: measure.value for measure in outcome.measures}
    assert errors["sketch"] < 0.01 < errors["zero"]
    assert set(outcome.releases) == {"sketch"}
    path.unlink()
    memory = table.load(config, workdir).sketch
    assert memory.guarantee == outcome.headline
    assert memory.num_records == 200


@pytest.mark.slow
def test_the_owner_hears_of_rows_that_are_moved_into_the_domain(tmp_path, capsys):
    """Keys in [0, 1]² of the length √2 are no keys of a ball of radius 1."""
    path = own_memory(tmp_path)
    for domain, heard in (("ball", ["50 of 200 keys"]), ("box", [])):
        config = own_config(path, domain=domain, features="taylor", temperature=2.0)
        table.run(config, tmp_path / domain)
        said = capsys.readouterr()
        assert [x.split(" lie")[0] for x in said.err.splitlines() if "moved" in x] == heard
        assert "moved" not in said.out
    with log.quiet():
        table.run(own_config(path, features="taylor", temperature=2.0), tmp_path / "quiet")
    assert "moved" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "best"), [(0.0, "zero"), (0.5, "dp_mean")])
def test_the_best_trivial_answer_to_an_own_memory_follows_from_its_values(shift, best, tmp_path):
    """Values about zero are answered by zero, and others by their private mean."""
    rng = np.random.default_rng(0)
    K, V = rng.random((200, 2)), shift + rng.uniform(-0.1, 0.1, (200, 1))
    np.savez(tmp_path / "memory.npz", K=K, V=V[:, 0])
    config = own_config(tmp_path / "memory.npz", epsilon=1.0)
    outcome = table.run(config, tmp_path / "run")
    (by,) = outcome.comparisons
    assert comparison.best_baseline(by, outcome.measures) == best
    # The mean of V is not released, and costs nothing.
    assert set(outcome.releases) == {"sketch"}
    errors = {measure.row: measure.value for measure in outcome.measures}
    domain, _ = table._chosen(config, K, V)
    drawn = np.asarray(table._private_means(config, domain, jax.numpy.asarray(V)))
    std = 2 / 200 * gaussian_noise_multiplier(config.epsilon, config.delta)
    assert np.std(drawn - V.mean()) == pytest.approx(std, rel=0.5)
    assert errors["dp_mean"] == pytest.approx(std * np.sqrt(2 / np.pi), rel=0.7)


def test_exact_attention_is_as_sharp_as_training_rows_say():
    """What changes from sector to sector is found by sharp attention, and what is random by flat."""
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 2 * np.pi, 300)
    keys = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    near = np.eye(2)[(angles // (np.pi / 8)).astype(int) % 2].astype(np.float32)
    prices = np.sin(8 * angles)[:, None]
    asked = labelled.Documents(keys, near.argmax(1), keys[:5], np.zeros(5, int), 2, keys)
    assert retrieval.best_logit(asked, near, 0) >= 8
    errors = {}
    for logit in (2.0 * times for times in kernel_regression.SHARPER):
        weights = np.exp(logit * keys[:30] @ keys[30:].T.astype(np.float64))
        answers = weights @ prices[30:] / weights.sum(axis=1, keepdims=True)
        errors[logit] = np.abs(answers - prices[:30]).mean()
    best = min(errors, key=lambda logit: errors[logit])
    assert kernel_regression.best_logit(keys, prices, 2.0) == best > 2
    # Whoever asks later has no part in it.
    other = asked._replace(queries=-keys[:5], truth=np.ones(5, int))
    assert retrieval.best_logit(other, near, 0) == retrieval.best_logit(asked, near, 0)


def embeddings(folder, dim=384):
    """A file of 60 unit vectors as a text encoder makes them, with one-hot labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=60)
    keys = rng.normal(size=(3, dim))[labels] + 0.3 * rng.normal(size=(60, dim))
    path = folder / "memory.npz"
    np.savez(path, K=keys / np.linalg.norm(keys, axis=1, keepdims=True), V=np.eye(3)[labels])
    return path


@pytest.mark.slow
def test_embeddings_of_384_columns_are_released_with_no_flag_but_the_bounds(tmp_path):
    """The Taylor features of the paper's temperature would take 1.75e4 GiB here."""
    config = own_config(embeddings(tmp_path), value_domain="simplex")
    table.validate(config)
    planned = table.plan(config).parameters
    assert planned["degree"] == 2
    assert planned["told_apart"] > 0.9
    outcome = table.run(config, tmp_path / "run")
    asked = table.load(config, tmp_path / "run")
    memory = asked.sketch
    assert memory.domain.kind == "ball"
    assert memory.domain.value_domain == "simplex"
    assert memory.domain.scale == planned["temperature"]
    assert outcome.headline == memory.guarantee
    with np.load(config.data.path) as file:
        found = np.asarray(memory.query(file["K"]))
        assert (found.argmax(1) == file["V"].argmax(1)).mean() > 0.95
        (answer,) = asked.ask([",".join(map(str, file["K"][0].tolist()))])
        np.testing.assert_allclose(list(answer.values()), found[0], atol=1e-5)
    with pytest.raises(ValueError, match="must be 384 numbers"):
        asked.ask(["0.1,0.2"])


def test_features_that_take_too_much_name_the_flags(tmp_path):
    config = own_config(embeddings(tmp_path), domain="box", features="taylor")
    with pytest.raises(ValueError, match=r"GiB") as error:
        table.validate(config)
    for flag in ("features=auto", "degree=2", "temperature", "features=random"):
        assert f"--config.{flag}" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    config.degree = 2
    table.validate(config)


def test_the_temperature_of_features_that_are_named_is_the_root_of_the_width(tmp_path):
    config = own_config(own_memory(tmp_path), features="taylor", degree=2)
    assert table.plan(config).parameters["temperature"] == pytest.approx(2**0.5)
    config.temperature = 0.7
    assert table.plan(config).parameters["temperature"] == 0.7


@pytest.mark.slow
def test_a_memory_of_texts_is_loaded_and_asked(tmp_path):
    config = config_file.get_config("retrieval,tiny")
    outcome = retrieval.run(config, tmp_path)
    accuracies = {measure.place: measure.value for measure in outcome.measures}
    assert all(retrieval.ASSUMED in spent.assumptions for spent in outcome.releases.values())
    assert accuracies["sketch"] > 0.9 > 0.4 > accuracies["majority"]
    assert accuracies["attention"] > 0.9
    memory, data = retrieval.load(config, tmp_path), labelled.load(config)
    scores = classifiers.memory_scores(memory.sketch, data.queries)
    assert classifiers.accuracy(scores, data.truth) == accuracies["sketch"]
    texts, groups = labelled._generated(20, np.random.default_rng(1))
    answers = memory.ask(texts)
    best = [max(answer, key=answer.__getitem__) for answer in answers]
    assert np.mean(np.array(best) == groups) > 0.8
    assert all(sum(answer.values()) == pytest.approx(1) for answer in answers)
    assert list(memory.ask([""])[0]) == memory.names  # no word is known


def test_a_document_that_asks_names_no_group(tmp_path):
    """Only the public half of the later documents does, so that no held-out one names what is released."""
    config = config_file.get_config("retrieval,tiny")
    config.update_from_flattened_dict(own_files.groups(tmp_path, None))
    before = labelled.load(config)
    path = tmp_path / "public.csv"
    rows = path.read_text().splitlines()
    asks = labelled.halves(config, rows[1:])[1][0]
    rows[1 + asks] = rows[1 + asks].rpartition(",")[0] + ",a group of its own"
    path.write_text("\n".join(rows))
    after = labelled.load(config)
    assert after.names == before.names
    np.testing.assert_array_equal(after.keys, before.keys)
    np.testing.assert_array_equal(after.queries, before.queries)
    assert after.truth[0] == -1
    np.testing.assert_array_equal(after.truth[1:], before.truth[1:])


def test_what_a_memory_gives_is_shares_of_one_where_all_scores_are_negative(monkeypatch):
    scores = np.array([[-1.0, -2.0], [3.0, 1.0], [-1.0, 2.0]])
    monkeypatch.setattr(retrieval, "memory_scores", lambda *_: scores)
    memory = retrieval.Memory(types.SimpleNamespace(), lambda texts: texts, ["a", "b"])
    found = [list(answer.values()) for answer in memory.ask(["x"] * 3)]
    np.testing.assert_allclose(found, [[0.5, 0.5], [0.75, 0.25], [0.0, 1.0]])


def test_a_document_has_a_vote_of_at_most_one_in_sums_of_any_size():
    rng = np.random.default_rng(0)
    keys = (rng.normal(size=(5000, 8)) + 2).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    values = np.ones((5000, 1), np.float32)
    for place in range(8):
        whole, less = (
            votes.exact_scores(
                types.SimpleNamespace(keys=keys[kept], queries=keys[[place]]), values[kept], 1.0
            )
            for kept in (slice(None), np.arange(5000) != place)
        )
        assert 1 - 1e-6 <= (whole - less).item() <= 1 + 1e-9


def test_class_means_without_noise_are_means():
    rng = np.random.default_rng(0)
    keys, labels = rng.normal(size=(200, 3)), rng.integers(4, size=200)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    exact = {"epsilon": 1e8, "delta": 1e-5}
    means, _ = classifiers.class_means(jax.random.key(0), keys, np.eye(4)[labels], **exact)
    want = [keys[labels == label].mean(0) for label in range(4)]
    np.testing.assert_allclose(means, want, atol=1e-4)


def test_the_nearest_mean_is_that_of_the_smallest_distance():
    rng = np.random.default_rng(1)
    keys, labels = rng.normal(size=(200, 3)), rng.integers(4, size=200)
    values, sums = np.eye(4)[labels], np.zeros((4, 4))
    sums[:, 0], sums[:, 1:] = values.sum(0) / 2, values.T @ keys
    queries = rng.normal(size=(50, 3))
    means = np.stack([keys[labels == label].mean(0) for label in range(4)])
    distances = np.linalg.norm(queries[:, None] - means, axis=2)
    found = classifiers.nearest_mean(queries, sums, 0.0)
    np.testing.assert_array_equal(found.argmax(1), distances.argmin(1))
    assert np.isfinite(classifiers.nearest_mean(queries, np.ones((4, 4)), 0.0)).all()


def test_a_class_whose_mean_is_noise_attracts_nothing():
    """Of 1,000 documents of two classes and 5 of a third, with noise as long as a hundred documents."""
    rng = np.random.default_rng(2)
    labels = np.repeat([0, 1, 2], [500, 500, 5])
    keys = 3 * np.eye(100)[labels] + rng.normal(size=(1005, 100)) + 5
    rows = np.concatenate([np.full((1005, 1), 0.5), keys], axis=1)
    sums = np.eye(3)[labels].T @ rows + rng.normal(size=(3, 101)) * 10
    queries = 3 * np.eye(100)[labels] + rng.normal(size=(1005, 100)) + 5
    found = classifiers.nearest_mean(queries, sums, 10.0).argmax(1)
    assert (found == labels).mean() > 0.95
    means = sums[:, 1:] / np.maximum(2 * sums[:, :1], 1)
    assert ((queries @ means.T).argmax(1) == labels).mean() < 0.6


@pytest.mark.slow
def test_what_private_class_means_say_is_weighted_by_nothing_exact(tmp_path, monkeypatch):
    """Where all classes have one mean, nothing tells them apart: exact shares of the classes would."""
    config = config_file.get_config("retrieval,tiny")
    truth = retrieval.labelled.load(config).truth
    equal = np.random.default_rng(0).normal(size=config.dim) * np.ones((config.num_groups, 1))
    spent = classifiers.guarantee(1.0, 1e-5, "class means")
    monkeypatch.setattr(retrieval, "class_means", lambda *_, **__: (equal, spent))
    measures = {m.name: m.value for m in retrieval.run(config, tmp_path).measures}
    assert measures["class_means/accuracy"] == pytest.approx(np.mean(truth == 0))
