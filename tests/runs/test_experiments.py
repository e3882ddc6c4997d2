"""What runs leave: their records and models, keys that belong to their data, and one claim on a folder."""

import functools
import json
import stat
import warnings

import jax
import numpy as np
import pytest
from command_line import call
from own_runs import config_of, go

import dpx
from dpx import _storage as storage
from dpx import ngram
from dpx.data import load_surnames, synthetic_histories
from dpx.recommend import item_gram, popularity
from dpx.runs import figures, records, report, run
from dpx.training import keys
from dpx.training import users as people
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import histories as recommender_data
from experiments.dp_transformer import training

NAME = "configs/quickstart.py:tiny"


@pytest.mark.slow
def test_quickstart_leaves_its_records_and_a_model(tmp_path, monkeypatch):
    """A private run: table, figure, guarantee, and no trace of the key."""
    seen, write, folder = {}, run.write, tmp_path / "run"

    def spying_write(*arguments):
        secret = folder / "secret"
        seen["modes"] = [stat.S_IMODE(p.stat().st_mode) for p in (secret, secret / "keys.json")]
        seen["keys"] = json.loads((secret / "keys.json").read_text())
        write(*arguments)

    monkeypatch.setattr(run, "write", spying_write)
    record = go(NAME, folder)
    assert seen["modes"] == [0o700, 0o600]
    secret = bytes.fromhex(seen["keys"]["noise"])
    assert len(secret) == 4 * jax.random.key_data(jax.random.key(0)).size
    words = [secret, *(seen["keys"][name].encode() for name in ("noise", "sampling", "data"))]
    for path in folder.rglob("*"):
        assert not path.is_file() or not any(word in path.read_bytes() for word in words)
    assert not (folder / "secret").exists()

    rows = {name.split("/")[0] for name in record.metrics}
    assert rows == {"dp_1gram", "dp_2gram", "start", "dp_transformer", "transformer"}
    assert record.privacy == {
        "epsilon": record.releases["dp_transformer"]["epsilon"],
        "delta": 1e-5,
        "neighboring": "add_or_remove_one",
        "unit": "name",
    }
    assert 0.999 * 3 < record.privacy["epsilon"] <= 3 < record.total["epsilon"]
    files = {"config.json", "environment.json", "privacy.json", "metrics.jsonl", "result.json"}
    assert files <= {path.name for path in folder.iterdir()}
    assert any("loss" in words for words in record.private["not_covered"])
    text = report.summarize(record)
    assert "| **DP transformer** | 2.9" in text
    assert "Ten names" in text
    drawn = [path.name for path in figures.draw([record], folder)]
    assert drawn == ["training.png", "rows.png"]

    model = records.load(folder)
    assert len(model.sample(jax.random.key(0), 5)) == 5
    assert (model.log_prob(["smith", "qqq"]) < 0).all()
    # Finished: it reads back and does not run again, also on other devices.
    assert go(NAME, folder) == record == go(NAME, folder, **{"mesh.data": 1})
    with pytest.raises(ValueError, match="another config, with other values of seed: "):
        go(NAME, folder, seed=1)


def drawn(config, workdir, **about):
    """The words of a release's key, and those of a seed."""
    opened = keys.open_keys(config, workdir, **about)
    return str(jax.random.key_data(opened.noise("release"))), str(opened.seed("draw").entropy)


def test_keys_are_fresh_from_the_system_and_kept_until_discarded(tmp_path):
    config = config_of(NAME)
    first, again = drawn(config, tmp_path / "a"), drawn(config, tmp_path / "a")
    assert first == again
    assert not set(first) & set(drawn(config, tmp_path / "b"))
    keys.discard(tmp_path / "a")
    assert not set(first) & set(drawn(config, tmp_path / "a"))
    config.noise_seed = 4
    assert drawn(config, tmp_path / "c") == drawn(config, tmp_path / "d")
    kept = (tmp_path / "c" / "secret" / "keys.json").read_text()
    assert "noise" not in kept
    assert "sampling" not in kept


@pytest.mark.parametrize("left", ["checkpoints", "metrics.jsonl", "privacy.json", "gram.npz"])
def test_new_keys_are_not_made_for_a_run_that_has_begun(tmp_path, left):
    config = config_of(NAME)
    for before in ("config.json", "environment.json", "log.txt", ".lock", "a.partial"):
        (tmp_path / before).touch()
    keys.open_keys(config, tmp_path)
    (tmp_path / left).touch()
    keys.open_keys(config, tmp_path)
    keys.discard(tmp_path)
    with pytest.raises(keys.CannotResumeError, match="use a new workdir"):
        keys.open_keys(config, tmp_path)
    assert not (tmp_path / "secret").exists()


@pytest.mark.slow
def test_a_run_without_its_keys_ends_in_one_line_and_status_2(tmp_path):
    run.prepare(config_of(NAME), NAME, tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir()
    ended = call("run", f"--config={NAME}", f"--workdir={tmp_path / 'run'}")
    assert ended.returncode == 2
    started, error = ended.stderr.splitlines()
    assert started == "dp_transformer.language_model: started; compiling comes first"
    assert error.startswith("error: ")
    assert "noise keys are gone" in error


def test_keys_belong_to_the_data_that_they_were_made_for(tmp_path):
    config = config_of(NAME)
    data = (np.arange(4), np.arange(2))
    copies = (array.copy() for array in data)
    assert drawn(config, tmp_path, data=data) == drawn(config, tmp_path, data=copies)
    for other in (
        (),
        (np.arange(4), np.arange(1, 3)),
        (np.arange(4).astype(np.int32), np.arange(2)),
        (np.array([0, 1, 2]), np.array([3, 0, 1])),
    ):
        with pytest.raises(keys.CannotResumeError, match="the data changed since the run"):
            keys.open_keys(config, tmp_path, data=other)


@pytest.mark.quick_cases("names", "seeded")
@pytest.mark.parametrize(
    ("source", "broken", "changes"),
    [
        pytest.param(NAME, (ngram, "fit"), {}, id="names"),
        pytest.param(NAME, (ngram, "fit"), {"noise_seed": 918273645}, id="seeded"),
        pytest.param("recommender:amazon,tiny", (popularity, "fit"), {}, id="amazon"),
        pytest.param("gram:recommender,tiny", (item_gram, "fit"), {}, id="gram"),
    ],
)
def test_a_killed_run_does_not_resume_on_other_data(tmp_path, monkeypatch, source, broken, changes):
    def write(seed):
        lines = np.random.default_rng(seed).permutation(load_surnames()[:3000])
        if source != NAME:
            users = enumerate(synthetic_histories(80, 6, 15, seed=seed).items, start=1)
            lines = [f"{user} {item + 1}" for user, items in users for item in items]
        (tmp_path / "data.txt").write_text("\n".join(lines))
        # As another process would read it.
        recommender_data._loaded.cache_clear()
        corpora._names.cache_clear()

    def kill(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(*broken, kill)
    changes = {"data.path": str(tmp_path / "data.txt"), **changes}
    write(seed=1)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            go(source, tmp_path / "run", **changes)
    write(seed=2)
    with pytest.raises(keys.CannotResumeError, match="the data changed"):
        go(source, tmp_path / "run", **changes)


def test_a_folder_that_is_in_use_is_not_run_in(tmp_path):
    """Two runs in one folder would draw noise twice and pay for it once."""
    config = config_of(NAME)
    run.prepare(config, NAME, tmp_path)
    with storage.lock(tmp_path), pytest.raises(storage.BusyError, match="in use by another"):
        run.execute(config, tmp_path)
    assert not (tmp_path / "secret").exists()


def test_keys_that_cannot_be_deleted_are_reported_and_the_result_stands(tmp_path, monkeypatch):
    config = config_of(NAME)
    run.prepare(config, NAME, tmp_path)
    keys.open_keys(config, tmp_path)
    result = {"metrics": {"a": 1.0}, "measures": [], "privacy": {}, "wall_seconds": 0.0}
    storage.write_json(tmp_path / "result.json", result)

    def fail(path):
        raise PermissionError(f"planted: {path}")

    monkeypatch.setattr(keys.shutil, "rmtree", fail)
    with pytest.warns(UserWarning, match=r"secret could not be deleted \(planted"):
        assert run.execute(config, tmp_path).metrics == {"a": 1.0}
    monkeypatch.undo()
    run.execute(config, tmp_path)
    assert not (tmp_path / "secret").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys.discard(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "filtered"),  # by default, and by min_count=5 and 0
    [
        ("movielens", None, (True, True, False)),
        ("movielens1m", "ratings.dat", (True, True, False)),
        ("amazon", "games.csv", (True, True, False)),
        ("amazon", "games.txt", (True, True, True)),  # filtered before they were published
        ("synthetic", None, (False, None, False)),
    ],
)
def test_guarantees_assume_a_public_filter_wherever_one_ran(kind, name, filtered):
    for min_count, expected in zip((None, 5, 0), filtered, strict=True):
        changes = {"data.kind": kind, "data.path": name, "data.min_count": min_count}
        assumed = recommender_data.assumptions(config_of("gram:recommender,tiny", **changes))
        assert expected is None or assumed == ((recommender_data.K_CORE,) if expected else ())


@pytest.mark.slow
@pytest.mark.parametrize("min_count", [None, 0, 5])
@pytest.mark.parametrize("source", ["recommender:amazon,tiny", "gram:recommender,tiny"])
def test_every_guarantee_of_a_recommender_names_the_filter(
    tmp_path, monkeypatch, source, min_count
):
    monkeypatch.setattr(training, "train", lambda loss_fn, params, **rest: params)
    path = tmp_path / "ratings.csv"
    users = enumerate(synthetic_histories(80, 6, 15, seed=2).items)
    lines = (f"{u},{item},5,{t}\n" for u, items in users for t, item in enumerate(items))
    path.write_text("".join(lines))
    changes = {"num_seeds": 2, "data.path": str(path), "data.min_count": min_count}
    config = config_of(source, **changes)
    made = records.experiment(config).run(config, tmp_path / "run")
    assert len(made.releases) > 3
    for spent in (*made.releases.values(), made.headline, run.compose(made.releases)):
        assert (recommender_data.K_CORE in spent.assumptions) == (min_count != 0)
        assert people.ASSUMPTION in spent.assumptions


@pytest.mark.slow
def test_a_noise_seed_reproduces_a_run(tmp_path):
    changes = {"noise_seed": 3, "num_seeds": 1}
    one, other = (go("recommender:synthetic,tiny", tmp_path / name, **changes) for name in "ab")
    assert one.metrics == other.metrics


def test_a_folder_is_claimed_once_and_a_half_written_claim_is_none(tmp_path):
    config = config_of(NAME)
    killed, other = tmp_path / "killed", tmp_path / "other"
    killed.mkdir()
    (killed / "config.json.1a2b3c4d.partial").write_text("{")
    records.begin(config, NAME, killed)
    records.begin(config, NAME, killed)
    assert (killed / "config.json").exists()
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="holds no run"):
        records.begin(config, NAME, other)


@pytest.mark.slow
def test_a_model_without_a_prior_is_saved_and_loaded(tmp_path):
    changes = {"prior.budget_fraction": 0.0, "ngrams": (1,), "non_private.steps": 0}
    record = go(NAME, tmp_path / "run", **changes)
    assert set(record.releases) == {"dp_1gram", "dp_transformer"}
    assert np.isfinite(records.load(record.workdir).log_prob(["smith"])).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "changes"),
    [(NAME, {"ngrams": (1,)}), ("recommender:synthetic,tiny", {"num_seeds": 1})],
)
def test_the_clipping_engine_trains_as_per_example_autodiff_does(
    tmp_path, monkeypatch, source, changes
):
    """The same noise, the same curve, to float tolerance."""
    clipped_grad, curves = dpx.clipped_grad, []
    for method in ("auto", "vmap"):
        monkeypatch.setattr(dpx, "clipped_grad", functools.partial(clipped_grad, method=method))
        fixed = {"noise_seed": 5, "non_private.steps": 0}
        record = go(source, tmp_path / method, **fixed, **changes)
        logged = storage.read_lines(record.workdir / "metrics.jsonl")
        curves.append([entry["loss"] for entry in logged])
    assert len(curves[0]) > 1
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4)
