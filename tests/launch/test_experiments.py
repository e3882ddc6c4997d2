"""The command lines, as a user meets them."""

import csv
import functools
import json
import os
import signal
import stat
import subprocess
import time
import warnings

import jax
import numpy as np
import pytest
from command_line import ROOT, call, command

import dpx
from dpx import _storage as storage
from dpx import ngram
from dpx.data import load_surnames, synthetic_histories
from dpx.launch import (
    figures,
    records,
    report,
    run,
    sweep,
)
from dpx.launch.sweep import grid, point_config
from dpx.recommend import item_gram, popularity
from dpx.training import (
    keys,
)
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import (
    histories as recommender_data,
)
from experiments.dp_transformer import (
    training,
)


def execute(source, workdir, **changes):
    config = records.load_config(source)
    config.update(changes)
    run.prepare(config, source, workdir)
    return run.execute(config, workdir)


@pytest.mark.slow
def test_quickstart_leaves_its_records_and_a_model(tmp_path, monkeypatch):
    """A private run: table, figure, guarantee, and no trace of the key."""
    seen, write = {}, run.write

    def spying_write(*arguments):
        folder = tmp_path / "run" / "secret"
        seen["modes"] = [stat.S_IMODE(p.stat().st_mode) for p in (folder, folder / "keys.json")]
        seen["keys"] = json.loads((folder / "keys.json").read_text())
        write(*arguments)

    monkeypatch.setattr(run, "write", spying_write)
    record = execute("configs/quickstart.py:tiny", tmp_path / "run")
    assert seen["modes"] == [0o700, 0o600]
    secret = bytes.fromhex(seen["keys"]["noise"])
    assert len(secret) == 4 * jax.random.key_data(jax.random.key(0)).size
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert secret not in content
            assert seen["keys"]["noise"].encode() not in content
            assert seen["keys"]["sampling"].encode() not in content
            assert seen["keys"]["data"].encode() not in content
    assert not (tmp_path / "run" / "secret").exists()

    rows = {name.split("/")[0] for name in record.metrics}
    assert rows == {"dp_1gram", "dp_2gram", "start", "dp_transformer", "transformer"}
    assert record.privacy == {
        "epsilon": record.releases["dp_transformer"]["epsilon"],
        "delta": 1e-5,
        "neighboring": "add_or_remove_one",
        "unit": "name",
    }
    assert 0.999 * 3 < record.privacy["epsilon"] <= 3
    assert record.total["epsilon"] > 3
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files >= {
        "config.json",
        "environment.json",
        "privacy.json",
        "metrics.jsonl",
        "result.json",
    }
    private = storage.read_json(tmp_path / "run" / "privacy.json")
    assert any("loss" in words for words in private["not_covered"])
    text = report.summarize(record)
    assert "| **DP transformer** | 2.9" in text
    assert "Ten names" in text
    assert [p.name for p in figures.draw([record], tmp_path / "run")] == [
        "training.png",
        "rows.png",
    ]

    model = records.load(tmp_path / "run")
    assert len(model.sample(jax.random.key(0), 5)) == 5
    assert (model.log_prob(["smith", "qqq"]) < 0).all()
    # Finished: it reads back and does not run again.
    assert execute("configs/quickstart.py:tiny", tmp_path / "run") == record
    with pytest.raises(ValueError, match="another config, with other values of seed: "):
        execute("configs/quickstart.py:tiny", tmp_path / "run", seed=1)
    # On other devices it is the same run.
    assert execute("configs/quickstart.py:tiny", tmp_path / "run", mesh={"data": 1}) == record


def drawn(config, workdir, **about):
    """The words of a release's key, and those of a seed."""
    opened = keys.open_keys(config, workdir, **about)
    return str(jax.random.key_data(opened.noise("release"))), str(opened.seed("draw").entropy)


def test_keys_are_fresh_from_the_system_and_kept_until_discarded(tmp_path):
    config = records.load_config("configs/quickstart.py:tiny")
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
    config = records.load_config("configs/quickstart.py:tiny")
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
    source = "configs/quickstart.py:tiny"
    run.prepare(records.load_config(source), source, tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir()
    ended = call("run", f"--config={source}", f"--workdir={tmp_path / 'run'}")
    assert ended.returncode == 2
    started, *errors = ended.stderr.splitlines()
    assert started == "dp_transformer.language_model: started; compiling comes first"
    assert len(errors) == 1, ended.stderr
    assert errors[0].startswith("error: ")
    assert "noise keys are gone" in errors[0]


def test_keys_belong_to_the_data_that_they_were_made_for(tmp_path):
    config = records.load_config("configs/quickstart.py:tiny")
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


@pytest.mark.quick_cases("configs/quickstart.py:tiny-broken0")
@pytest.mark.parametrize(
    ("source", "broken"),
    [
        ("configs/quickstart.py:tiny", (ngram, "fit")),
        ("configs/recommender.py:amazon,tiny", (popularity, "fit")),
        pytest.param(
            "configs/gram.py:recommender,tiny", (item_gram, "fit"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_killed_run_does_not_resume_on_other_data(tmp_path, monkeypatch, source, broken):
    def write(seed):
        lines = np.random.default_rng(seed).permutation(load_surnames()[:3000])
        if "quickstart" not in source:
            users = enumerate(synthetic_histories(80, 6, 15, seed=seed).items, start=1)
            lines = [f"{user} {item + 1}" for user, items in users for item in items]
        (tmp_path / "data.txt").write_text("\n".join(lines))
        # As another process would read it.
        recommender_data._loaded.cache_clear()
        corpora._names.cache_clear()

    def kill(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(*broken, kill)
    changes = {"data": {"path": str(tmp_path / "data.txt")}}
    write(seed=1)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            execute(source, tmp_path / "run", **changes)
    write(seed=2)
    with pytest.raises(keys.CannotResumeError, match="the data changed"):
        execute(source, tmp_path / "run", **changes)


def test_a_folder_that_is_in_use_is_not_run_in(tmp_path):
    """Two runs in one folder would draw noise twice and pay for it once."""
    source = "configs/quickstart.py:tiny"
    config = records.load_config(source)
    run.prepare(config, source, tmp_path)
    with storage.lock(tmp_path), pytest.raises(storage.BusyError, match="in use by another"):
        run.execute(config, tmp_path)
    assert not (tmp_path / "secret").exists()


def test_keys_that_cannot_be_deleted_are_reported_and_the_result_stands(tmp_path, monkeypatch):
    source = "configs/quickstart.py:tiny"
    config = records.load_config(source)
    run.prepare(config, source, tmp_path)
    keys.open_keys(config, tmp_path)
    storage.write_json(
        tmp_path / "result.json",
        {"metrics": {"a": 1.0}, "measures": [], "privacy": {}, "wall_seconds": 0.0},
    )

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
    ("kind", "name", "min_count", "filtered"),
    [
        ("movielens", None, None, True),
        ("movielens", None, 5, True),
        ("movielens", None, 0, False),
        ("movielens1m", "ratings.dat", None, True),
        ("movielens1m", "ratings.dat", 0, False),
        ("amazon", "games.csv", None, True),
        ("amazon", "games.csv", 5, True),
        ("amazon", "games.csv", 0, False),
        # Filtered before they were published.
        ("amazon", "games.txt", None, True),
        ("amazon", "games.txt", 5, True),
        ("amazon", "games.txt", 0, True),
        ("synthetic", None, None, False),
        ("synthetic", None, 0, False),
    ],
)
def test_guarantees_assume_a_public_filter_wherever_one_ran(kind, name, min_count, filtered):
    config = records.load_config("configs/gram.py:recommender,tiny")
    config.data.update({"kind": kind, "path": name, "min_count": min_count})
    assumed = recommender_data.assumptions(config)
    assert assumed == ((recommender_data.K_CORE,) if filtered else ())


@pytest.mark.slow
@pytest.mark.parametrize("min_count", [None, 0, 5])
@pytest.mark.parametrize(
    "source", ["configs/recommender.py:amazon,tiny", "configs/gram.py:recommender,tiny"]
)
def test_every_guarantee_of_a_recommender_names_the_filter(
    tmp_path, monkeypatch, source, min_count
):
    monkeypatch.setattr(training, "train", lambda loss_fn, params, **rest: params)
    path = tmp_path / "ratings.csv"
    users = enumerate(synthetic_histories(80, 6, 15, seed=2).items)
    path.write_text(
        "".join(f"{u},{item},5,{t}\n" for u, items in users for t, item in enumerate(items))
    )
    config = records.load_config(source)
    config.num_seeds = 2
    config.data.path = str(path)
    config.data.update({"min_count": min_count})
    made = records.experiment(config).run(config, tmp_path / "run")
    assert len(made.releases) > 3
    for spent in (*made.releases.values(), made.headline, run.compose(made.releases)):
        assert (recommender_data.K_CORE in spent.assumptions) == (min_count != 0)


@pytest.mark.slow
def test_noise_seed_weakens_the_wording_and_reproduces(tmp_path):
    outcomes = [
        execute("configs/recommender.py:synthetic,tiny", tmp_path / name, noise_seed=3, num_seeds=1)
        for name in "ab"
    ]
    assert outcomes[0].metrics == outcomes[1].metrics
    for spent in outcomes[0].releases.values():
        words = " ".join(spent["assumptions"])
        assert "noise_seed stays unknown" in words
        assert "for one run on one data set only" in words


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "configs/quickstart.py:tiny",
        pytest.param("configs/recommender.py:synthetic,tiny", marks=pytest.mark.slow),
    ],
)
def test_no_two_releases_share_their_noise(tmp_path, monkeypatch, source):
    """The keys of every release, and of every training step, are all different."""
    used = []

    def spend(key):
        used.append(tuple(jax.random.key_data(key).tolist()))

    def train(loss_fn, params, *, keys, label, config, privacy, **rest):
        if privacy is not None:
            own = keys.training(label)
            for step in range(config.steps):
                spend(jax.random.fold_in(own.noise, step))
            spend(own.dropout)
        return params

    for module in (ngram, popularity):
        fit = module.fit
        monkeypatch.setattr(
            module,
            "fit",
            lambda key, *args, _fit=fit, **kw: (spend(key), _fit(key, *args, **kw))[1],
        )
    monkeypatch.setattr(training, "train", train)
    execute(source, tmp_path / "run")
    assert len(used) > 8
    assert len(set(used)) == len(used)


def test_a_folder_is_claimed_once_and_a_half_written_claim_is_none(tmp_path):
    source = "configs/quickstart.py:tiny"
    config = records.load_config(source)
    killed, other = tmp_path / "killed", tmp_path / "other"
    killed.mkdir()
    (killed / "config.json.partial").write_text("{")
    records.begin(config, source, killed)
    records.begin(config, source, killed)
    assert (killed / "config.json").exists()
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="holds no run"):
        records.begin(config, source, other)


def wait_for(condition, process, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_killed_at_a_checkpoint_resumes_to_the_same_result(tmp_path):
    settings = (
        "--config=configs/quickstart.py:tiny",
        "--config.noise_seed=1",
        "--config.train.steps=8",
    )
    settings += ("--config.non_private.steps=0",)
    whole = call("run", *settings, f"--workdir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    killed = tmp_path / "killed"
    process = subprocess.Popen(command("run", *settings, f"--workdir={killed}"), cwd=ROOT)
    checkpoints = killed / "checkpoints" / "dp_transformer"
    wait_for(lambda: any(p.name.isdigit() for p in checkpoints.glob("*")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "result.json").exists()
    resumed = call("run", *settings, f"--workdir={killed}")
    assert resumed.returncode == 0, resumed.stderr
    first, second = (records.read(tmp_path / name) for name in ("whole", "killed"))
    assert first is not None
    assert second is not None
    assert first.metrics == second.metrics
    assert first.privacy == second.privacy
    assert (killed / "metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return [
            {k: v for k, v in row.items() if k != "wall_seconds"} for row in csv.DictReader(file)
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        pytest.param(("2,8", "0"), id="small"),
        pytest.param(("1,2,4,8", "0,1"), id="whole", marks=pytest.mark.slow),
    ],
)
def test_a_sweep_killed_in_the_middle_gives_the_same_results(tmp_path, values):
    source = "configs/recommender.py:synthetic,tiny"
    axes = [f"--set=epsilon={values[0]}", f"--set=seed={values[1]}", "--set=num_seeds=1"]
    axes.append("--set=non_private.steps=0")
    whole = call("sweep", f"--config={source}", *axes, f"--workdir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    killed = tmp_path / "killed"
    arguments = command("sweep", f"--config={source}", *axes, f"--workdir={killed}")
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(lambda: any(killed.glob("*/result.json")), process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "results.csv").exists()
    again = call("sweep", f"--config={source}", *axes, f"--workdir={killed}")
    assert again.returncode == 0, again.stderr
    assert rows(killed / "results.csv") == rows(tmp_path / "whole" / "results.csv")
    assert len(rows(killed / "results.csv")) == len(list(killed.rglob("result.json"))) > 1
    assert {"report.md", "results.csv", "ndcg_at_10_against_epsilon.png"} <= {
        path.name for path in killed.iterdir()
    }


@pytest.mark.slow
def test_a_failing_point_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    execute_point, done = run.execute, []

    def failing(config, workdir):
        if config.seed == 0:
            raise RuntimeError("planted")
        done.append(config.seed)
        return execute_point(config, workdir)

    monkeypatch.setattr(run, "execute", failing)
    source = "configs/recommender.py:synthetic,tiny"
    overrides = {"num_seeds": 1, "non_private.steps": 0}
    points = [{"seed": seed, **overrides} for seed in (0, 1)]
    failed = sweep.run_points(source, points, tmp_path)
    assert done == [1]
    assert [name for name, _ in failed] == [sweep.point_name(points[0])]
    assert "planted" in capsys.readouterr().err
    assert len(records.read_all(tmp_path)) == 1


@pytest.mark.slow
def test_a_model_without_a_prior_is_saved_and_loaded(tmp_path):
    changes = {"prior": {"budget_fraction": 0.0}, "ngrams": (1,), "non_private": {"steps": 0}}
    record = execute("configs/quickstart.py:tiny", tmp_path / "run", **changes)
    assert set(record.releases) == {"dp_1gram", "dp_transformer"}
    scored = records.load(record.workdir).log_prob(["smith"])
    assert np.isfinite(scored).all()


def configs():
    for path in sorted((ROOT / "configs").glob("*.py")):
        if path.stem not in ("__init__", "common"):
            yield f"configs/{path.name}"


@pytest.mark.parametrize("path", list(configs()))
def test_every_swept_key_exists(path):
    module = records.config_module(path)
    for arg in ("", "tiny", *(f"{v},tiny" for v in getattr(module, "VARIANTS", ()))):
        points = grid(f"{path}:{arg}", [])
        assert points
        config = point_config(f"{path}:{arg}", points[-1])
        assert {"experiment", "epsilon", "delta", "seed", "noise_seed"} <= set(config)


@pytest.mark.slow
def test_movielens_runs_on_real_histories(tmp_path):
    record = execute(
        "configs/recommender.py:movielens,tiny",
        tmp_path / "run",
        num_seeds=1,
        non_private={"steps": 0},
    )
    assert set(record.metrics) >= {"popularity/ndcg@10", "dp_transformer/hit@10"}
    recommended = records.load(tmp_path / "run").recommend([1, 2, 3], k=5, exclude_seen=True)
    assert len(set(recommended) - {1, 2, 3}) == 5


@pytest.mark.slow
def test_amazon_and_movielens_1m_run_from_files(tmp_path):
    lines = [f"{user} {1 + (user + step) % 9}" for user in range(1, 40) for step in range(5)]
    (tmp_path / "games.txt").write_text("\n".join(lines))
    ratings = [f"{line.replace(' ', '::')}::5::{n}" for n, line in enumerate(lines)]
    (tmp_path / "ratings.dat").write_text("\n".join(ratings))
    for kind, name in (("amazon", "games.txt"), ("movielens1m", "ratings.dat")):
        config = records.load_config(f"configs/recommender.py:{kind},tiny")
        config.data.path = str(tmp_path / name)
        run.check(config)
    config = records.load_config("configs/recommender.py:amazon,tiny")
    config.update({"data": {"path": str(tmp_path / "games.txt")}, "num_seeds": 1})
    run.prepare(config, "configs/recommender.py:amazon,tiny", tmp_path / "run")
    record = run.execute(config, tmp_path / "run")
    assert set(record.releases) == {"dp_popularity", "start", "dp_transformer", "served"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "configs/quickstart.py:tiny",
        pytest.param("configs/recommender.py:synthetic,tiny", marks=pytest.mark.slow),
    ],
)
def test_the_clipping_engine_trains_as_per_example_autodiff_does(tmp_path, monkeypatch, source):
    """The same noise, the same curve, to float tolerance."""
    clipped_grad, curves = dpx.clipped_grad, []
    for method in ("auto", "vmap"):
        monkeypatch.setattr(dpx, "clipped_grad", functools.partial(clipped_grad, method=method))
        changes = {"num_seeds": 1} if "recommender" in source else {"ngrams": (1,)}
        record = execute(
            source, tmp_path / method, noise_seed=5, non_private={"steps": 0}, **changes
        )
        lines = (record.workdir / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["loss"] for line in lines])
    assert len(curves[0]) > 1
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4)
