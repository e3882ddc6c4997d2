"""Selections: what is given away, what stays private, and that they go on where they were killed."""

import json
import math
import shutil
import stat

import jax
import numpy as np
import pytest
from command_line import call
from dp_accounting import ComposedDpEvent, GaussianDpEvent, dp_event
from dp_accounting.rdp import RdpAccountant
from own_runs import config_of, own, sweep_command

from dpx import _storage as storage
from dpx import privacy
from dpx.runs import experiment, points, records, selection, selection_plan, sweep
from dpx.training import checkpoints, keys

VALUES = {"rate": 1.0, "steps": 4, "users": 100, "lies": False, "fails": 0, "sizes": (1,)}
VALUES |= {"data": {"path": "a"}}
# Its model is noise, and its metric how large the rate is.
EXPERIMENT = """
import os
from pathlib import Path
import jax
import numpy as np
import dpx
from dpx.runs.experiment import Candidate, Measure, Outcome, Plan
from dpx.training import checkpoints, keys, resuming

def held_out(config):
    path = Path(config.data.path)
    return np.loadtxt(path) if path.exists() else np.zeros(config.users)

def validate(config): pass

def public_files(config): return [np.frombuffer(os.urandom(8), np.uint8)]  # somebody changes them

def plan(config): return Plan({"model": spent(config)}, {})

def spent(config):
    return dpx.privacy.dpsgd_guarantee(1.0, config.delta, sampling_probability=0.01, steps=config.steps,
                                       unit="user", accountant="rdp", assumptions=["users are counted"])

def candidate(config):
    found = spent(config)
    data = held_out(config)
    return Candidate("model", found, {"hit": 1 / len(data)}, ("names.txt",), config.synthetic,
                     resuming.digest([data]))

def run(config, workdir):
    opened = keys.open_keys(config, workdir, synthetic=config.synthetic, data=[held_out(config)])
    noise, draw = opened.noise("model"), opened.seed("draw").entropy
    with (workdir / "attempts").open("a") as file:
        file.write(f"{jax.random.key_data(noise).tolist()} {draw}\\n")
    if len((workdir / "attempts").read_text().splitlines()) <= config.fails:
        raise RuntimeError("planted")
    print("exact metric: see here")
    checkpoints.save_model(workdir, {"w": {"x": jax.random.normal(noise, (3,))}})
    (workdir / "names.txt").write_text("public names")
    (workdir / "metrics.jsonl").write_text("")
    if config.lies:
        config.steps += 1
    exact = config.rate + 1 / 3
    return Outcome([Measure("model", "hit", exact), Measure("model", "other", exact)], spent(config),
                   {"model": spent(config)}, synthetic=config.synthetic, headline_row="model")
"""
AXES = ("rate=0.25,0.5,0.75",)
EXACT = [f"{rate + 1 / 3:.6f}"[:7] for rate in (0.25, 0.5, 0.75)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    more = 'config.synthetic = arg == "synthetic"'
    return own(tmp_path_factory.mktemp("own"), EXPERIMENT, more, **VALUES)


def plan(source, *axes, select="hit", trials="geometric:4", score_noise=2.0, **fixed):
    grid = sweep.grid(source, list(axes or AXES))
    return selection_plan.plan(source, grid, select, trials, score_noise, fixed=fixed)


def here(tasks):
    ended = [points.attempt(task, quiet=True) for task in tasks]
    return [(task.name, e.error) for task, e in zip(tasks, ended, strict=True) if e.state != "done"]


def selected(asked, folder, run_tasks=here):
    selection.begin(asked, folder)
    return selection.finish(asked, folder, run_tasks)


def drawn(folder):
    return json.loads((folder / records.PRIVATE / "drawn.json").read_text())


def attempts(folder):
    """The keys of each attempt, by trial."""
    return [path.read_text().splitlines() for path in folder.rglob("attempts")]


def fixed(monkeypatch, count):
    monkeypatch.setattr(privacy.Trials, "draw", lambda self, generator: count)


def command(monkeypatch, source, folder, given=None, **more):
    asked = {"select": "hit", "trials": "geometric:4", "score_noise": 2.0, "set": list(AXES)}
    sweep_command(monkeypatch, source, folder, given, **asked | more)


@pytest.mark.slow
def test_only_the_selected_model_and_its_noisy_score_are_given_away(
    source, tmp_path, monkeypatch, capfd
):
    fixed(monkeypatch, 7)
    command(monkeypatch, source, tmp_path)
    told = "".join(capfd.readouterr())
    chosen, private = tmp_path / "selected", tmp_path / records.PRIVATE
    names = {path.name for path in chosen.iterdir() if not path.name.startswith(".lock")}
    files = {"config.json", "environment.json", "privacy.json", "result.json"}
    assert names == files | {"model", "names.txt"}
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert len(list(private.glob("trial*"))) == 7
    # Exact metrics and the number of trials are nowhere else.
    public = [p for p in tmp_path.rglob("*") if p.is_file() and private not in p.parents]
    for text in (told, *(path.read_bytes().decode(errors="ignore") for path in public)):
        assert not any(value in text for value in (*EXACT, "trial6", "of 7", "planted"))
    record = records.read(chosen)
    price = plan(source).price
    assert record.wall_seconds is None
    assert record.total["epsilon"] == record.releases["model"]["epsilon"]
    assert record.releases["model"] == json.loads(json.dumps(price.guarantee.to_json()))
    assert "users are counted" in record.total["assumptions"]
    assert f"this selection ε = {price.guarantee.epsilon:.4g}" in told
    # The model is that of the trial whose score is the highest.
    trials = [records.read(path) for path in private.glob("trial*")]
    best = [t.workdir for t in trials if t.overrides.items() <= record.overrides.items()]
    assert record.public_files in [t.public_files for t in trials if t.workdir in best]
    template = {"w": {"x": np.zeros(3, np.float32)}}
    given = checkpoints.load_model(chosen, template)["w"]["x"]
    kept = [checkpoints.load_model(path, template)["w"]["x"] for path in best]
    assert sum(np.array_equal(given, one) for one in kept) == 1
    assert abs(record.metrics["model/hit"] - record.config["rate"] - 1 / 3) < 8 * 2.0 / 100
    # The report counts the selection, and not its trials.
    assert [found.workdir for found in records.read_all(tmp_path)] == [chosen]


@pytest.mark.slow
def test_a_score_has_the_noise_that_is_paid_for(source, tmp_path):
    asked = plan(source)
    selection.begin(asked, tmp_path)
    task = points.Task(source, asked.grid[1], str(tmp_path / records.PRIVATE), "trial0")
    assert here([task]) == []
    each = [
        selection._score(asked, asked.candidates[1], key, task)
        for key in jax.random.split(jax.random.key(0), 300)
    ]
    assert np.mean(each) == pytest.approx(0.5 + 1 / 3, abs=4 * 0.02 / np.sqrt(300))
    assert np.std(each) == pytest.approx(2.0 / 100, rel=0.15)


@pytest.mark.slow
def test_what_is_fixed_holds_for_every_trial_and_what_is_selected(source, tmp_path, monkeypatch):
    """Of data too, which are no axis, since the trials of a selection have one data set."""
    fixed(monkeypatch, 2)
    command(monkeypatch, source, tmp_path, {"data.path": "b", "steps": 5})
    found = [records.read(path) for path in (tmp_path / records.PRIVATE).glob("trial*")]
    assert len(found) == 2
    for record in (*found, records.read(tmp_path / "selected")):
        assert (record.config["data"]["path"], record.config["steps"]) == ("b", 5)
    event = plan(source, steps=5).candidates[0].guarantee.event
    assert found[0].releases["model"]["event"] == str(event)
    with pytest.raises(SystemExit):  # another selection
        command(monkeypatch, source, tmp_path, {"data.path": "c", "steps": 5})


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["", ":synthetic"])
def test_every_score_has_noise_of_its_own(source, tmp_path, monkeypatch, variant):
    """And so has every trial."""
    fixed(monkeypatch, 4)
    noisy, real = [], selection._score
    monkeypatch.setattr(selection, "_score", lambda *args: noisy.append(real(*args)) or noisy[-1])
    found = selected(plan(source + variant, "rate=0.5"), tmp_path)
    assert len(set(noisy)) == 4
    assert found.metrics == {"model/hit": max(noisy)}
    assert len({used for (used,) in attempts(tmp_path)}) == 4
    assert not list(tmp_path.rglob("keys.json"))


def test_points_are_drawn_uniformly_and_with_replacement(source, monkeypatch):
    fixed(monkeypatch, 60)
    asked = plan(source)
    counts = np.bincount(np.concatenate([selection._draw(asked)["points"] for _ in range(50)]))
    assert len(counts) == 3
    assert (np.abs(counts - 1000) < 5 * np.sqrt(3000 * 2 / 9)).all()
    fixed(monkeypatch, 3)
    threes = [selection._draw(asked)["points"] for _ in range(200)]
    assert 130 < sum(len(set(three)) < 3 for three in threes) < 180  # 7/9 of them


@pytest.mark.slow
def test_a_selection_that_was_killed_goes_on_as_it_would_have(source, tmp_path, monkeypatch):
    def dies(tasks):
        here(tasks[:2])
        raise KeyboardInterrupt

    fixed(monkeypatch, 5)
    asked, killed = plan(f"{source}:synthetic"), tmp_path / "killed"
    whole = selected(asked, tmp_path / "left")
    with pytest.raises(KeyboardInterrupt):
        selected(asked, killed, dies)
    assert not (killed / "selected").exists()
    fixed(monkeypatch, 9)  # what would be drawn now is not asked for
    again = selected(asked, killed)
    assert (again.metrics, again.config) == (whole.metrics, whole.config)
    assert [len(lines) for lines in attempts(killed)] == [1] * 5


@pytest.mark.parametrize(
    ("now", "words"), [("0 1 1 1", "another number of held-out"), ("1 1", "the data changed")]
)
def test_scores_have_noise_for_the_data_of_all_trials(source, tmp_path, monkeypatch, now, words):
    def planned():
        return plan(source, **{"data.path": str(data)})

    def killed(tasks):
        here(tasks[:1])
        raise KeyboardInterrupt

    def rewritten(tasks):
        data.write_text(now)
        return here(tasks)

    fixed(monkeypatch, 2)
    data, folder = tmp_path / "data.txt", tmp_path / "s"
    data.write_text("0 1")
    with pytest.raises(KeyboardInterrupt):
        selected(planned(), folder, killed)
    data.write_text(now)
    with pytest.raises(ValueError, match=words):
        selected(planned(), folder)
    data.write_text("0 1")
    with pytest.raises(selection.TrialsFailedError):
        selected(planned(), folder, rewritten)
    log = folder / records.PRIVATE / "trial1" / "log.txt"
    assert "the data changed since the selection" in log.read_text()
    data.write_text("0 1")
    assert selected(planned(), folder).metrics


@pytest.mark.slow
def test_private_draws_are_made_once(source, tmp_path):
    asked, path = plan(source), tmp_path / records.PRIVATE / "drawn.json"
    selection.begin(asked, tmp_path)
    before = drawn(tmp_path)
    selection.begin(asked, tmp_path)
    assert drawn(tmp_path) == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for other in (
        plan(source, trials="geometric:5"),
        plan(source, trials="poisson:4"),
        plan(source, score_noise=3.0),
        plan(source, "rate=0.25,0.5"),
    ):
        with pytest.raises(ValueError, match="holds another selection"):
            selection.begin(other, tmp_path)
    path.unlink()
    with pytest.raises(keys.CannotResumeError, match="paid for twice"):
        selection.begin(asked, tmp_path)


def test_what_was_drawn_for_one_selection_serves_no_other(source, tmp_path, monkeypatch):
    """A selection may be killed when its draws lie in the folder, and what it asked for does not yet."""
    asked, other = plan(source), plan(source, trials="geometric:20")

    def dies(path, content):
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(storage, "write_json", dies)
        with pytest.raises(KeyboardInterrupt):
            selection.begin(asked, tmp_path)
    before = drawn(tmp_path)
    with pytest.raises(ValueError, match="holds another selection"):
        selection.begin(other, tmp_path)
    selection.begin(asked, tmp_path)
    assert drawn(tmp_path) == before


def test_a_folder_of_something_else_is_not_taken(source, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"holds no selection \(no selection.json\)"):
        selection.begin(plan(source), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_tuples_may_be_an_axis_of_a_selection(source, tmp_path):
    asked = plan(source, "sizes=[1],[1,2]")
    selection.begin(asked, tmp_path)
    assert selected(asked, tmp_path).config["sizes"] in ([1], [1, 2])


@pytest.mark.slow
def test_what_was_selected_stands_when_the_trials_are_deleted(source, tmp_path):
    asked, private = plan(source), tmp_path / records.PRIVATE
    selection.begin(asked, tmp_path)
    kept = (private / "drawn.json").read_bytes()
    found = selection.finish(asked, tmp_path, here)
    # The key of the scores' noise is deleted, also by the next command where a kill has left it.
    assert not (private / "drawn.json").exists()
    for left in ("drawn.json", "drawn.json.1a2b3c4d.partial"):
        (private / left).write_bytes(kept)
    assert selected(asked, tmp_path, None).metrics == found.metrics
    assert not [path for path in private.iterdir() if path.is_file()]
    shutil.rmtree(private)
    assert selected(asked, tmp_path, None).metrics == found.metrics


def test_no_trial_selects_nothing_at_the_same_price(source, tmp_path, monkeypatch, capsys):
    fixed(monkeypatch, 0)
    command(monkeypatch, source, tmp_path, trials="poisson:2")
    record = records.read(tmp_path / "selected")
    assert record.metrics == {}
    assert record.total["epsilon"] == plan(source, trials="poisson:2").price.guarantee.epsilon
    assert not (tmp_path / "selected" / "model").exists()
    assert "No trial was drawn" in capsys.readouterr().out


@pytest.mark.parametrize(("law", "shape"), [("geometric", 1.0), ("poisson", math.inf)])
def test_a_selection_costs_what_dp_accounting_says(source, law, shape):
    asked = plan(source, "rate=0.5", trials=f"{law}:4", score_noise=3.0)
    one = asked.candidates[0].guarantee
    trial = ComposedDpEvent([one.event, GaussianDpEvent(3.0)])
    event = dp_event.RepeatAndSelectDpEvent(trial, 4.0, shape)
    expected = RdpAccountant().compose(event).get_epsilon(one.delta)
    assert asked.price.guarantee.epsilon == pytest.approx(expected, rel=1e-9)


def test_every_candidate_is_in_the_price_drawn_or_not(source):
    dear, cheap, *both = [
        plan(source, f"steps={steps}").price.guarantee.epsilon
        for steps in ("4000", "4", "4,4000", "4000,4")
    ]
    assert both == [dear, dear]
    assert dear > cheap


@pytest.mark.slow
def test_a_failed_trial_selects_nothing(source, tmp_path, monkeypatch, capsys):
    fixed(monkeypatch, 2)
    axes = {"set": ["fails=3"]}
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, source, tmp_path, **axes)
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert "a trial failed" in told
    assert "planted" not in told
    assert not (tmp_path / "selected").exists()
    command(monkeypatch, source, tmp_path, **axes)
    assert records.read(tmp_path / "selected").metrics
    # Every attempt of a trial had the keys that it began with.
    assert [len(set(used)) for used in attempts(tmp_path)] == [1, 1]


@pytest.mark.slow
def test_a_run_that_costs_something_else_than_was_planned_is_not_selected(source, tmp_path):
    with pytest.raises(experiment.ContractError, match="let both be the same"):
        selected(plan(source, "lies=true", "rate=0.5"), tmp_path)
    assert not (tmp_path / "selected").exists()


@pytest.mark.parametrize(
    ("axes", "change", "words"),
    [
        (AXES, {"trials": "fixed:4"}, "must be geometric:MEAN or poisson:MEAN"),
        (AXES, {"trials": "geometric"}, "as in geometric:10"),
        (AXES, {"trials": "poisson:0.5"}, "mean=0.5 must be finite and at least 1"),
        (AXES, {"trials": None}, "--trials=None must be"),
        (AXES, {"select": None}, "--select is missing"),
        (AXES, {"select": "other"}, "use one of hit"),
        (AXES, {"score_noise": 0.0}, "--score_noise=0.0 must be finite and positive"),
        (("data.path=a,b",), {}, r"have one data set.* give one value as --config\.data\.path"),
        (("users=100,200",), {}, "measured on the same records"),
        (("delta=1e-6,1e-5",), {}, "delta=1e-05"),
    ],
)
def test_what_has_no_guarantee_is_named(source, axes, change, words):
    with pytest.raises(ValueError, match=words):
        plan(source, *axes, **change)


def test_the_trials_of_a_selection_are_logged_nowhere_else(source):
    config = records.load_config(source)
    config.log = "trials.csv"
    with pytest.raises(ValueError, match=r"config\.log=trials\.csv must be left out"):
        selection_plan._candidate(config, "hit")


def test_selections_that_experiments_and_seeds_do_not_allow_are_named(source):
    with pytest.raises(ValueError, match=r"--set=seed=… must have one value"):
        plan(f"{source}:synthetic", "seed=0,1")
    assert plan(source, "seed=0,1").price.guarantee.epsilon > 0
    with pytest.raises(ValueError, match=r"config\.noise_seed=3 must be None"):
        selection_plan._candidate(config_of(source, noise_seed=3), "hit")
    with pytest.raises(ValueError, match="must say how far one record can change"):
        plan("noisy_head:low_dim,tiny", "seed=0,1")


@pytest.mark.parametrize("change", [{"shard": "1/2"}, {"trials": None}, {"select": None}])
def test_wrong_commands_end_in_one_line(source, tmp_path, monkeypatch, capsys, change):
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, source, tmp_path, **change)
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_processes_run_trials(source, tmp_path):
    about = [f"--config={source}:synthetic", f"--set={AXES[0]}", "--select=hit"]
    results = []
    for workers in (1, 2):
        given = [f"--workdir={tmp_path / str(workers)}", f"--workers={workers}"]
        ended = call("sweep", *about, "--trials=poisson:6", *given)
        assert ended.returncode == 0, ended.stderr
        results.append(records.read(tmp_path / str(workers) / "selected").metrics)
    assert results[0] == results[1]
