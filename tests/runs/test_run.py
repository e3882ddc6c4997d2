"""What a run writes of its outcome and a report says of it: every assumption, and all that is not covered."""

import json
import re

import dp_accounting
import numpy as np
import pytest
from command_line import call
from own_runs import config_of, go, own, plain, written

import dpx
from dpx.privacy import ADD_OR_REMOVE_ONE, REPLACE_ONE
from dpx.runs import cli, comparison, records, report, run, tables
from dpx.runs.experiment import Measure, Outcome


def gaussian(multiplier=2.0, delta=1e-5, **about):
    event = dp_accounting.GaussianDpEvent(multiplier)
    return plain(dpx.gaussian_epsilon(multiplier, delta), delta, event=event, **about)


def outcome_of(*releases, **options):
    named = dict(zip("ab", releases, strict=False))
    measures = [Measure(name, "error", 1.0) for name in named]
    return Outcome(measures, releases[0], named, **options)


def test_what_is_not_covered_is_in_the_record_and_the_report(tmp_path):
    outcome = outcome_of(gaussian(), not_covered=["the losses", "the row b"])
    record = written(tmp_path, outcome)
    assert record.private["not_covered"] == ["the losses", "the row b"]
    text = report.summarize(record)
    assert "- not covered by any guarantee: the losses; the row b" in text
    assert "- assuming that it is a test" in text


@pytest.mark.parametrize(
    ("changes", "synthetic", "relation", "said"),
    [
        ({}, False, ADD_OR_REMOVE_ONE, None),
        ({"noise_seed": 3}, False, ADD_OR_REMOVE_ONE, "for one run on one data set only"),
        ({"noise_seed": 3}, True, ADD_OR_REMOVE_ONE, "while noise_seed stays unknown"),
        ({}, True, ADD_OR_REMOVE_ONE, "the data are synthetic"),
        ({"data": {"limit": 7}}, False, ADD_OR_REMOVE_ONE, "at most 7 that data.limit leaves"),
        ({"data": {"limit": 7}}, False, REPLACE_ONE, None),
    ],
)
def test_how_it_was_run_is_an_assumption(tmp_path, changes, synthetic, relation, said):
    outcome = outcome_of(gaussian(relation=relation), synthetic=synthetic)
    record = written(tmp_path, outcome, **changes)
    for guarantee in (*record.releases.values(), record.total):
        assert guarantee["assumptions"][0] == "it is a test"
        more = guarantee["assumptions"][1:]
        assert len(more) == (said is not None)
        assert said is None or said in more[0]


def test_the_total_is_at_the_largest_delta_beside_the_sum_of_plain_ones():
    noise = {"a": gaussian(2.0, 1e-6), "b": gaussian(3.0, 1e-5)}
    total = run.compose(noise)
    assert total.delta == 1e-5
    assert total.epsilon == pytest.approx(dpx.gaussian_epsilon(1 / np.hypot(1 / 2, 1 / 3), 1e-5))
    with_plain = run.compose(noise | {"c": plain(0.5, 2e-6), "d": plain(0.5, 3e-6)})
    assert with_plain.delta == pytest.approx(1.5e-5, rel=1e-12)
    assert with_plain.epsilon == pytest.approx(1.0 + total.epsilon, rel=1e-6)
    both = run.compose({"a": plain(1.0, 1e-6), "b": plain(0.5, 2e-6)})
    assert (both.epsilon, both.delta) == pytest.approx((1.5, 3e-6))


def test_the_total_of_plain_guarantees_has_their_delta_to_the_last_bit():
    """The sum of six is less by one rounding than their exact sum, and that was an error after the run."""
    total = run.compose({str(n): plain(0.5, 1e-6) for n in range(6)})
    assert (total.epsilon, total.delta) == (3.0, pytest.approx(6e-6))
    # An event that the ledger does not know adds up like none.
    event = dp_accounting.ZCDpEvent(0.1)
    total = run.compose({name: plain(0.5, 1e-6, event=event) for name in "ab"})
    assert (total.epsilon, total.delta) == (1.0, 2e-6)


def test_a_run_without_delta_has_a_total_and_a_report(tmp_path):
    found = [written(tmp_path / name, outcome_of(plain(0.5, 0.0))) for name in "ab"]
    assert (found[0].total["epsilon"], found[0].total["delta"]) == (0.5, 0.0)
    assert "ε = 1, δ = 0, add or remove one user" in report.totals(found)[0]


def test_the_risk_of_the_total_is_its_own(tmp_path):
    record = written(tmp_path, outcome_of(gaussian(), gaussian()))
    risk = record.private["risk"]
    assert risk["headline"]["add_or_remove_one"]["mu"] == pytest.approx(1 / 2)
    assert risk["total"]["add_or_remove_one"]["mu"] == pytest.approx(1 / np.sqrt(2))
    for relation, one in record.risk.items():
        total = risk["total"][relation]["tpr_at_1_percent"]
        assert 0.01 < one["tpr_at_1_percent"] < total < 1
    assert "risk of the result, as the true-positive rate" in report.summarize(record)
    assert json.loads((tmp_path / "result.json").read_text())["risk"] == risk["headline"]


def test_totals_are_of_one_unit(tmp_path):
    found = [
        written(tmp_path / str(number), outcome_of(gaussian(unit=unit)))
        for number, unit in enumerate(("user", "name", "user"))
    ]
    words, apart = report.totals(found)
    assert "over 2 runs" in words
    assert "add or remove one user" in words
    assert "add or remove one user, to add or remove one name" in apart


def test_errors_over_seeds_are_those_of_the_mean(tmp_path):
    found = []
    for seed, value in enumerate((1.0, 2.0, 4.0)):
        outcome = Outcome([Measure("a", "error", value)], gaussian(), {"a": gaussian()})
        found.append(written(tmp_path / str(seed), outcome, seed=seed))
    # The standard deviation with n − 1, over √n.
    (measure,) = tables.averaged(found)
    assert comparison.in_words(measure) == "2.333 ± 0.88"


LARGE = """
import jax.numpy as jnp
import numpy as np
from dpx.training import keys

def validate(config):
    if config.of == "check":
        np.zeros(2**50)

def plan(config): return {}

def run(config, workdir):
    keys.open_keys(config, workdir, data=[np.arange(3)])
    if config.steps:
        (workdir / "metrics.jsonl").write_text("{}")
    np.zeros(2**50) if config.of == "machine" else jnp.zeros(2**46).block_until_ready()
"""


REPLACED = """
from pathlib import Path
import dpx
import numpy as np
from dpx.runs.experiment import Outcome

def validate(config): pass
def plan(config): return {}
def public_files(config): return [np.frombuffer(Path(config.base_path).read_bytes(), np.uint8)]
def load(config, workdir): return "adapters of the " + Path(config.base_path).read_text()

def run(config, workdir):
    Path(config.base_path).write_text("second")
    spent = dpx.privacy.gaussian_guarantee(
        1.0, 1e-6, neighboring=dpx.privacy.REPLACE_ONE, unit="row", mechanism="none")
    return Outcome([], spent, {"model": spent})
"""


def test_a_run_states_the_public_files_that_it_began_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    base.write_text("first")
    go(own(tmp_path, REPLACED, base_path="base"), tmp_path / "run")
    monkeypatch.chdir("/")  # paths are relative to the folder of the run's command
    with pytest.raises(ValueError, match="have changed since"):
        records.load(tmp_path / "run")
    base.write_text("first")
    assert records.load(tmp_path / "run") == "adapters of the first"


def test_a_log_over_a_file_of_ones_own_is_refused_before_a_run_begins(tmp_path):
    path, log = own(tmp_path, LARGE, of="", log="mine.csv"), tmp_path / "mine.csv"
    log.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="must be no file of yours"):
        run.prepare(config_of(path, log=str(log)), path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def large(tmp_path):
    return own(tmp_path, LARGE, of="machine", steps=0)


@pytest.mark.parametrize("of", ["machine", "device"])
def test_too_little_memory_is_one_line_and_leaves_no_keys(tmp_path, large, of):
    config = config_of(large, of=of)
    for _ in range(2):  # the second begins again
        run.prepare(config, large, tmp_path / "run")
        with pytest.raises(MemoryError) as error:
            run.execute(config, tmp_path / "run")
        assert not list((tmp_path / "run").glob("secret/*"))
        (line,) = cli.in_one_line(error.value).splitlines()
        assert re.fullmatch(r"not enough memory: use less data.*\(.*[Aa]llocat.*\)", line)
    # What was trained can go on, and needs them.
    config.steps, kept = 1, []
    run.prepare(config, large, tmp_path / "later")
    for _ in range(2):
        with pytest.raises(MemoryError):
            run.execute(config, tmp_path / "later")
        kept.append((tmp_path / "later/secret/keys.json").read_text())
    assert kept[0] == kept[1]


@pytest.mark.slow
@pytest.mark.parametrize("of", ["check", "machine", "device"])
def test_too_little_memory_ends_a_command_with_one_line(tmp_path, large, of):
    done = call("run", f"--config={large}", f"--workdir={tmp_path / 'run'}", f"--config.of={of}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: not enough memory: use less data")
    done = call("sweep", f"--config={large}", f"--workdir={tmp_path / 's'}", f"--set=of={of}")
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "not enough memory" in done.stderr
