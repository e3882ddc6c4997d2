"""What a user can get wrong on a command line ends in one line, status 2, before anything is written."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from all_configs import all_sources
from command_line import DPX, ROOT, call, python
from ml_collections import ConfigDict
from own_runs import config_of, plain, sweep_command
from zygote import Zygote

from dpx.data import surnames
from dpx.privacy import REPLACE_ONE
from dpx.runs import cli, records, run, sweep
from dpx.runs.experiment import Measure, Outcome, Plan

TINY = "configs/quickstart.py:tiny"
FILES = {"BROKEN": "1 2\n1 3\n1 x\n", "SHORT": "1 1\n1 2\n2 1\n2 3\n"}
SYNTHETIC = "run --workdir=NEW --config=recommender:synthetic,tiny "
AMAZON = "run --workdir=NEW --config=configs/recommender.py:amazon,tiny "


BAD = [
    ("export --workdir=absent --to=new", "absent holds no finished run"),
    ("export --workdir=absent", "--to is missing"),
    ("run --config=configs/absent.py", "configs/absent.py: no such config file"),
    ("run --config=configs/quickstart.py:bogus", "'bogus' is not known: use one of tiny"),
    (f"run --config={TINY} --config.nope=3", "no key 'nope'"),
    (f"run --config={TINY} --noconfig.tied", "no key 'tied'"),
    (f"run --config={TINY} --config.epsilon=a", "epsilon=a"),
    ("sweep --config=configs/quickstart.py:bogus", "'bogus' is not known: use one of tiny"),
    ("run --config=quickstart:tiny --epsilon=3", "did you mean --config.epsilon?"),
    ("run --config=quickstart:tiny --config.epsilonn=3", "did you mean --config.epsilon?"),
    ("run --config=quickstrat", "gram, next_tokens, noisy_head, quickstart"),
    ("run --workdir=NEW", "or one of audit, "),
    ("sweep --config=gram:tiny --set=delta=0 --set=delta=1 --workdir=NEW", "given twice"),
    ("sweep --config=gram:tiny --set=epsilon=1,2,1.0 --workdir=NEW", "one value twice"),
    ("sweep --config=gram:tiny --set=epsilon=1e-3,0.001 --workdir=NEW", "one value twice"),
    (f"sweep --config={TINY} --set=no=1 --workdir=NEW", "no key 'no'"),
    ("plan --records=100", "--epsilon is missing: use"),
    ("plan --records=100 --epsilon=0", "epsilon=0.0 must be in (0, 1e8]"),
    ("plan --records=100 --epsilon=1 --epochs=-1", "epochs=-1.0 must be finite and positive"),
    ("plan --records=0 --epsilon=1", "records"),
    ("recommend --workdir=absent", "--history is missing"),
    ("predict --workdir=absent", "--text is missing"),
    ("sample --workdir=absent", "absent holds no finished run"),
    ("report --workdir=absent", "absent holds no finished run"),
    ("reprt", "did you mean report?"),
    ("bench.gram --columns=0", "columns"),
    ("bench.noisy_head --nope", "nope"),
    (f"{SYNTHETIC}--config.nonsense=1", "nonsense"),
    (f"{SYNTHETIC}--config.epsilon=0", "epsilon"),
    (f"{SYNTHETIC}--config.train.batch_size=100000", "sampling probability"),
    (f"{SYNTHETIC}--config.data.user=a", "use recommender:table,tiny"),
    (f"{AMAZON}--config.data.path=BROKEN", "line 3"),
    (f"{AMAZON}--config.data.path=absent.txt", "no such file"),
    (f"{AMAZON}--config.data.path=SHORT", "no user of three items"),
    ("run --workdir=NEW --config=gram:recommender,tiny --config.data.path=SHORT", "of three items"),
    (f"{SYNTHETIC}extra", "extra"),
    (f"{SYNTHETIC}--config.experiment=gram.own_matrix", "fixed by the config file"),
    (f"{SYNTHETIC}--workdir=", "--workdir is missing"),
    (
        "sweep --workdir=NEW --config=quickstart:tiny --config.log=/no/log.csv --set=epsilon=1,2",
        "no absolute path: each point",
    ),
]


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as started:
        yield started


@pytest.mark.quick_cases("0", "6", "13", "15", "26", "30")
@pytest.mark.parametrize(("command", "words"), BAD, ids=range(len(BAD)))
def test_bad_flags_end_in_one_line_and_status_2(zygote, tmp_path, command, words):
    folder = tmp_path / "where"
    folder.mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
        command = command.replace(name, str(tmp_path / name))
    module, *arguments = command.replace("NEW", str(folder / "new")).split()
    status, stderr, _ = zygote.start(module, *arguments, folder=folder)
    assert status == 2
    assert words in stderr
    assert len(stderr.splitlines()) == 1, stderr
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("source", "hurried"), [("gram:recommender,tiny", True), ("gram:table", False)]
)
def test_a_tiny_run_is_compiled_in_a_hurry(monkeypatch, source, hurried):
    changed = {}
    monkeypatch.setattr(cli.jax.config, "update", lambda name, value: changed.update({name: value}))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    cli.hurry(source)
    assert changed == ({"jax_disable_most_optimizations": True} if hurried else {})
    assert ("JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ) == hurried


@pytest.mark.parametrize("source", list(all_sources()))
def test_every_key_can_be_set_and_every_swept_key_exists(source):
    """A key called `keys` would be a method where a flag looks for it, so that no command could set it."""
    keys = records.flatten(records.load_config(source)).keys()
    assert not set(dir(ConfigDict)) & {part for key in keys for part in key.split(".")}
    module, arg = records.config_module(source), source.partition(":")[2]
    if hasattr(module, "sweep"):
        axes = module.sweep(arg)
        assert axes.keys() <= keys
        assert max(len(values) for values in axes.values()) > 1
        sweep.point_config(source, sweep.grid(source, [])[-1])


@pytest.mark.parametrize(("axis", "words"), [
    ("epsilon=[1", "'\\[1' is not a value"),
    ("epsilon=1,", "empty value in --set=epsilon=1,"),
    ("epsilon=", "empty value"),
    ("epsilon", "key=v1,v2"),
    ("experiment=foo", "fixed by the config file"),
    ("nope=1", "no key 'nope'"),
    ("epsilon=yes", "--set=epsilon=True must be a number"),
    ("epsilon=null", "--set=epsilon=None"),
    ("train.steps=true", "--set=train.steps=True must be a number"),
    ("model.dim=1,2", "--set=model.dim=… is also given as --config.model.dim"),
    ("noise_seed=no", "must not be given to a sweep"),
])  # fmt: skip
def test_bad_axes_are_named(axis, words):
    with pytest.raises(ValueError, match=words):
        sweep.point_config(TINY, sweep.grid(TINY, [axis], ["model.dim"])[0])


def test_what_is_fixed_is_no_axis():
    assert {"epsilon"} == {key for point in sweep.grid(TINY, [], ["seed"]) for key in point}
    assert sweep.grid(TINY, [], ["epsilon", "seed"]) == [{}]
    with pytest.raises(ValueError, match="noise_seed=… must not be given to a sweep"):
        sweep.grid(TINY, ["epsilon=1,2"], fixed={"noise_seed": 1})


def test_a_key_without_a_value_takes_its_type():
    with pytest.raises(ValueError, match="--set=column_bound=True must be a number"):
        sweep.point_config("gram:table", {"column_bound": True})
    points = sweep.grid("gram:table", ["column_bound=2,5e-1,null"])
    found = [sweep.point_config("gram:table", point).column_bound for point in points]
    assert found == [2.0, 0.5, None]


@pytest.mark.parametrize("axis", ["ngrams=[1,2],[],[3]", "ngrams=(1,2),(),(3,)"])
def test_tuples_are_values_of_an_axis(axis):
    found = sweep.grid("finetune:tiny", [axis, "seed=0,1"])
    assert [point["ngrams"] for point in found[::2]] == [(1, 2), (), (3,)]
    chosen = [sweep.point_config("finetune:tiny", point) for point in found]
    assert [config.ngrams for config in chosen[::2]] == [(1, 2), (), (3,)]
    assert len({sweep.point_name(point) for point in found}) == 6


def test_names_of_points_fit_into_file_systems_and_stay_apart():
    overrides = {f"section.name{number}": "ε" * 9 for number in range(20)}
    names = {sweep.point_name(overrides | {"seed": seed}) for seed in range(3)}
    assert len(names) == 3
    assert all(len(name.encode()) <= 255 and name.startswith("section.name0=") for name in names)
    assert sweep.point_name({"epsilon": 1.0, "seed": 0}) == "epsilon=1.0,seed=0"


def test_a_sweep_without_a_usable_folder_ends_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("not a folder")
    taken = tmp_path / "sweep" / "seed=1"
    taken.mkdir(parents=True)
    (taken / "something").write_text("else")
    for name, words in (("file", "Not a directory"), ("sweep", "seed=1 is not empty")):
        with pytest.raises(SystemExit) as ended:
            sweep_command(monkeypatch, "gram:tiny", tmp_path / name, set=["seed=0,1"])
        assert ended.value.code == 2
        told = capsys.readouterr().err
        assert words in told
        assert len(told.splitlines()) == 1


def test_a_package_that_is_missing_has_one_remedy():
    unknown = ModuleNotFoundError("No module named 'pandas'")
    remedy = 'in the clone of dpx, pip install -e ".[data,plots]"'
    assert cli.in_one_line(unknown) == f"{unknown}: {remedy}"
    known = ModuleNotFoundError("GGUF files need gguf: pip install gguf")
    assert cli.in_one_line(known) == str(known)


@pytest.mark.parametrize("name", ["Smith!", "Smith", "a" * 14])
def test_names_that_cannot_be_encoded_are_named(name):
    with pytest.raises(ValueError, match="at most 13 letters a–z"):
        surnames.encode(["smith", name])
    assert np.all(surnames.encode(["smith"]).tokens[0, 5:] == surnames.END)


@pytest.mark.parametrize(("changed", "named"), [
    ({"noise_seed": -1}, "config.noise_seed=-1"),
    ({"seed": -1}, "config.seed=-1"),
    ({"seed": 10**23}, f"config.seed={10**23} must be below 2**63"),
    ({"experiment": "absent"}, "config.experiment='absent'"),
    ({"experiment": "plotting"}, "config.experiment='plotting'"),
    ({"non_private.batch_size": 10_000}, "config.non_private.batch_size=10000"),
    ({"non_private.batch_size": 0}, "config.non_private.batch_size=0"),
    ({"non_private.steps": -1}, "config.non_private.steps=-1"),
    ({"train.accountant": "foo"}, "config.train.accountant='foo'"),
    ({"train.l2_clip_norm": float("inf")}, "config.train.l2_clip_norm=inf"),
    ({"train.learning_rate": float("inf")}, "config.train.learning_rate=inf"),
    ({"data.limit": -5}, "config.data.limit=-5"),
    ({"data.split_seed": -1}, "config.data.split_seed=-1"),
    ({"data.kind": "shakespeare"}, "configs/shakespeare.py"),
    ({"model.num_heads": 3}, "num_heads=3"),
    ({"model.dim": 0}, "dim=0"),
    ({"model.num_blocks": 0}, "num_blocks=0"),
    ({"model.dropout": 2.0}, "dropout=2"),
    ({"model.mlp_dim": 0}, "mlp_dim=0"),
    ({"model.mlp_dim": -1}, "mlp_dim=-1"),
    ({"model.kind": "gru", "model.num_blocks": 0}, "num_blocks=0"),
])  # fmt: skip
def test_bad_values_are_named_before_anything_runs(changed, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        run.check(config_of(TINY, **changed))


@pytest.mark.slow
def test_a_home_folder_is_found_and_output_fits_any_locale(tmp_path):
    """Shells leave the ~ of `--workdir=~/run` to the program, and who then cleans up types `rm -r ~`."""
    home, where = tmp_path / "home", tmp_path / "where"
    where.mkdir()
    config = records.load_config("gram:tiny")
    run.prepare(config, "gram:tiny", home / "run")
    outcome = Outcome([Measure("a", "b", 1.0)], plain(), {"a": plain()})
    run.write(outcome, config, home / "run", 1.0)
    given = {"HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    ended = python("-c", DPX, "report", "--workdir=~/run", folder=where, **given)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\\u03b5 = 1" in ended.stdout
    assert not list(where.iterdir())


@pytest.mark.slow
def test_dry_run_prints_the_privacy_parameters_and_writes_nothing(tmp_path):
    workdir = f"--workdir={tmp_path / 'run'}"
    ended = call("run", f"--config={TINY}", "--dry_run", "--config.delta=0.1", workdir)
    assert ended.returncode == 0, ended.stderr
    for name in ("noise_multiplier", "sampling_probability", "steps", "epsilon"):
        assert f"{name}: " in ended.stdout
    assert "  dp_2gram: ε = 3, δ = 0.1\n" in ended.stdout
    total = re.search(r"planned total of all releases: ε = ([\d.]+), δ = 0.1", ended.stdout)
    assert total is not None
    assert float(total[1]) > 4  # two n-gram models and a transformer, at ε = 3 each
    assert "warning: delta=0.1 exceeds 1/2000" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_a_sweep_adds_up_its_points_and_writes_nothing(tmp_path, monkeypatch, capsys):
    given = {"set": ["epsilon=1,2"], "dry_run": True}
    sweep_command(monkeypatch, "gram:tiny", tmp_path / "sweep", **given)
    told = capsys.readouterr().out
    costs = [float(cost) for cost in re.findall(r"^epsilon=[12]: ε = ([\d.]+)", told, re.M)]
    total = re.search(r"planned total of 2 points, .*: ε = ([\d.]+)", told)
    assert total is not None
    assert float(total[1]) == pytest.approx(sum(costs), rel=1e-5)
    assert 0 < costs[0] < costs[1]
    assert not (tmp_path / "sweep").exists()
    with pytest.raises(SystemExit):
        sweep_command(monkeypatch, "gram:tiny", tmp_path, **given, select="x", trials="poisson:2")
    assert "--dry_run must be left out with --select" in capsys.readouterr().err


def test_a_dry_run_of_a_sweep_adds_up_one_relation_and_unit_alone(monkeypatch, capsys):
    def of(epsilon, **about):
        return {"a": plain(epsilon, 1e-6, **about)}

    replaced = of(4.0, relation=REPLACE_ONE)
    points = {"1": of(1.0), "2": of(2.0), "3": replaced, "4": of(8.0, unit="name")}
    monkeypatch.setattr(sweep.run, "plan", lambda releases: Plan(releases, {}))
    sweep._show(points)
    *_, users, replacing, names = capsys.readouterr().out.splitlines()
    about = "points, if all are about the same data: ε ="
    assert f"2 {about} 3, δ = 2e-06 (add_or_remove_one, user), which is not added" in users
    assert f"1 {about} 4, δ = 1e-06 (replace_one, user), which is not added" in replacing
    assert f"1 {about} 8, δ = 1e-06 (add_or_remove_one, name), which is not" in names


@pytest.mark.slow
def test_an_interrupt_before_anything_has_begun_ends_in_one_line():
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'jax':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
    )
    ended = python("-c", f"{code}{DPX}", "run", "--config=quickstart:tiny")
    assert ended.returncode == 130
    assert ended.stderr == "interrupted before anything began: repeat the command\n"


@pytest.mark.slow
def test_a_run_without_progress_prints_no_loss(tmp_path):
    """Nor does a sweep, which says how far it is, and what it found, in a file of the data holder's."""
    for flags, printed in ((["--noprogress"], False), ([], True)):
        folder = tmp_path / str(printed)
        done = call("run", "--config=quickstart:tiny", f"--workdir={folder}", *flags)
        assert done.returncode == 0, done.stderr
        assert ("loss" in done.stderr) == printed
        assert "loss" in (folder / "metrics.jsonl").read_text()
    grid = ["--config=quickstart:tiny", "--set=epsilon=3", f"--workdir={tmp_path / 'sweep'}"]
    done = call("sweep", *grid, "--noprogress")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 of 1 done" in (tmp_path / "sweep" / "log.txt").read_text()


def test_output_that_nobody_reads_any_more_is_no_error():
    code = (
        "from dpx.runs import cli\nwith cli.OneLine():\n    while True:\n        print('a line')\n"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
