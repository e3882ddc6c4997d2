"""What a user can get wrong on a command line ends in one line, status 2, before anything is written."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import DPX, ROOT, call
from ml_collections import ConfigDict
from zygote import Zygote

import dpx
from dpx.data import surnames
from dpx.launch import cli, records, report, run, sources, sweep
from dpx.launch.experiment import Measure, Outcome


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as started:
        yield started


@pytest.mark.quick_cases(
    "export-arguments20-absent holds no finished run",
    "recommend-arguments17---history is missing",
    "plan-arguments13---epsilon is missing: use",
)
@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        ("run", ["--config=configs/absent.py"], "configs/absent.py: no such config file"),
        ("run", ["--config=configs/quickstart.py:bogus"], "'bogus' is not known: use one of tiny"),
        ("run", ["--config=configs/quickstart.py:tiny", "--config.nope=3"], "no key 'nope'"),
        ("run", ["--config=configs/quickstart.py:tiny", "--noconfig.tied"], "no key 'tied'"),
        ("run", ["--config=configs/quickstart.py:tiny", "--config.epsilon=a"], "epsilon=a"),
        ("sweep", ["--config=configs/quickstart.py:bogus"], "'bogus' is not known: use one of tiny"),
        ("run", ["--config=quickstart:tiny", "--epsilon=3"], "did you mean --config.epsilon?"),
        ("run", ["--config=quickstart:tiny", "--config.epsilonn=3"], "did you mean --config.epsilon?"),
        ("run", ["--config=quickstrat"], "gram, next_tokens, noisy_head, quickstart"),
        ("run", ["--workdir=NEW"], "or one of audit, "),
        ("sweep", ["--config=gram:tiny", "--set=delta=0", "--set=delta=1", "--workdir=NEW"], "given twice"),
        ("sweep", ["--config=gram:tiny", "--set=epsilon=1,2,1.0", "--workdir=NEW"], "one value twice"),
        ("sweep", ["--config=configs/quickstart.py:tiny", "--set=no=1", "--workdir=NEW"], "no key 'no'"),
        ("plan", ["--records=100"], "--epsilon is missing: use"),
        ("plan", ["--records=100", "--epsilon=0"], "epsilon=0.0 must be in (0, 1e8]"),
        ("plan", ["--records=100", "--epsilon=1", "--epochs=-1"], "epochs=-1.0 must be finite and positive"),
        ("plan", ["--records=0", "--epsilon=1"], "records"),
        ("recommend", ["--workdir=absent"], "--history is missing"),
        ("sample", ["--workdir=absent"], "absent holds no finished run"),
        ("export", ["--workdir=absent"], "--to is missing"),
        ("export", ["--workdir=absent", "--to=new"], "absent holds no finished run"),
        ("reprt", [], "did you mean report?"),
        ("bench.gram", ["--columns=0"], "columns"),
        ("bench.noisy_head", ["--nope"], "nope"),
    ],
)  # fmt: skip
def test_bad_arguments_end_in_one_line(zygote, tmp_path, module, arguments, words):
    arguments = [argument.replace("NEW", str(tmp_path / "new")) for argument in arguments]
    status, stderr, _ = zygote.start(module, *arguments, folder=tmp_path)
    assert status == 2
    assert words in stderr
    assert len(stderr.splitlines()) == 1, stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_help_is_no_failure():
    for module in ("run", "recommend"):
        ended = call(module, "--help")
        assert ended.returncode == 0
        assert "--workdir" in ended.stdout
        assert ("--config" in ended.stdout) == (module == "run")
    assert "dpx sample" in call("--help").stdout


@pytest.mark.parametrize(
    ("source", "hurried"), [("gram:recommender,tiny", True), ("gram:table", False)]
)
def test_a_tiny_run_is_compiled_in_a_hurry(monkeypatch, source, hurried):
    changed = {}
    monkeypatch.setattr(cli.jax.config, "update", lambda name, value: changed.update({name: value}))
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    cli.hurry(source)
    assert changed == ({"jax_disable_most_optimizations": True} if hurried else {})
    assert ("JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ) == hurried
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)


def variants_of(name):
    variants = getattr(records.config_module(name), "VARIANTS", ())
    return [f"{name}:{variant},tiny" for variant in variants] or [f"{name}:tiny"]


@pytest.mark.parametrize("name", sources.names())
def test_no_key_is_hidden_by_a_method_of_configs(name):
    """A key called `keys` would be a method where a flag looks for it, so that no command could set it."""
    methods = set(dir(ConfigDict))
    for source in variants_of(name):
        for key in records.flatten(records.load_config(source)):
            assert not methods & set(key.split(".")), f"{source}: {key}"


@pytest.mark.parametrize("name", sources.names())
def test_sweeps_change_keys_that_the_config_has(name):
    module = records.config_module(name)
    for source in variants_of(name) if hasattr(module, "sweep") else ():
        axes = module.sweep(source.partition(":")[2])
        assert axes.keys() <= records.flatten(records.load_config(source)).keys(), source
        assert max(len(values) for values in axes.values()) > 1, source


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 3}, "num_heads=3"),
        ({"dim": 0}, "dim=0"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"dropout": 2.0}, "dropout=2"),
        ({"mlp_dim": 0}, "mlp_dim=0"),
        ({"mlp_dim": -1}, "mlp_dim=-1"),
        ({"kind": "gru", "num_blocks": 0}, "num_blocks=0"),
    ],
)
def test_models_are_checked_before_anything_runs(changes, words):
    config = records.load_config("configs/quickstart.py:tiny")
    config.update({"model": changes})
    with pytest.raises(ValueError, match=words):
        run.check(config)


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ("epsilon=[1", "'\\[1' is not a value"),
        ("epsilon=1,", "empty value in --set=epsilon=1,"),
        ("epsilon=", "empty value"),
        ("epsilon", "key=v1,v2"),
        ("experiment=foo", "fixed by the config file"),
        ("nope=1", "no key 'nope'"),
        ("epsilon=yes", "--set=epsilon=True must be a number"),
        ("train.steps=true", "--set=train.steps=True must be a number"),
        ("noise_seed=no", "must not be given to a sweep"),
    ],
)
def test_bad_axes_are_named(axis, words):
    source = "configs/quickstart.py:tiny"
    with pytest.raises(ValueError, match=words):
        sweep.point_config(source, sweep.grid(source, [axis])[0])


def test_what_is_fixed_is_no_axis():
    source = "configs/quickstart.py:tiny"
    with pytest.raises(ValueError, match=r"--set=epsilon=… is also given as --config.epsilon"):
        sweep.grid(source, ["epsilon=1,2"], fixed=["epsilon"])
    assert {"epsilon"} == {key for point in sweep.grid(source, [], ["seed"]) for key in point}
    assert sweep.grid(source, [], ["epsilon", "seed"]) == [{}]


def test_a_key_without_a_value_takes_its_type():
    with pytest.raises(ValueError, match="--set=column_bound=True must be a number"):
        sweep.point_config("gram:table", {"column_bound": True})
    points = sweep.grid("gram:table", ["column_bound=2,5e-1,null"])
    found = [sweep.point_config("gram:table", point).column_bound for point in points]
    assert found == [2.0, 0.5, None]
    with pytest.raises(ValueError, match="--set=epsilon=None"):
        sweep.point_config("gram:table", {"epsilon": None})


@pytest.mark.parametrize("axis", ["ngrams=[1,2],[],[3]", "ngrams=(1,2),(),(3,)"])
def test_tuples_are_values_of_an_axis(axis):
    found = sweep.grid("configs/finetune.py:tiny", [axis, "seed=0,1"])
    assert [point["ngrams"] for point in found[::2]] == [(1, 2), (), (3,)]
    chosen = [sweep.point_config("configs/finetune.py:tiny", point) for point in found]
    assert [config.ngrams for config in chosen[::2]] == [(1, 2), (), (3,)]
    assert len({sweep.point_name(point) for point in found}) == 6


def test_names_of_points_fit_into_file_systems_and_stay_apart():
    overrides = {f"section.name{number}": "ε" * 9 for number in range(20)}
    names = {sweep.point_name(overrides | {"seed": seed}) for seed in range(3)}
    assert len(names) == 3
    assert all(len(name.encode()) <= 255 and name.startswith("section.name0=") for name in names)
    assert sweep.point_name({"epsilon": 1.0, "seed": 0}) == "epsilon=1.0,seed=0"


@pytest.mark.slow
def test_a_sweep_without_a_usable_folder_ends_in_one_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    source = "--config=configs/noisy_head.py:low_dim,tiny"
    ended = call("sweep", source, f"--workdir={blocked}", "--set=seed=0,1")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    taken = tmp_path / "sweep" / "seed=1"
    taken.mkdir(parents=True)
    (taken / "something").write_text("else")
    ended = call("sweep", source, f"--workdir={taken.parent}", "--set=seed=0,1")
    assert ended.returncode == 2
    assert "seed=1 is not empty" in ended.stderr


def test_a_sweep_whose_points_all_fail_lists_them(tmp_path, monkeypatch, capsys):
    def failing(config, workdir):
        raise RuntimeError("planted")

    monkeypatch.setattr(run, "execute", failing)
    source = "configs/noisy_head.py:low_dim,tiny"
    flag = SimpleNamespace(config={}, workdir=str(tmp_path), set=[])
    flag.executor, flag.workers, flag.shard, flag.slurm = "local", 1, "", []
    flag.select, flag.trials, flag.progress, flag.dry_run = None, None, True, False
    monkeypatch.setattr(sweep.flags, "FLAGS", flag)
    monkeypatch.setattr(sweep.cli, "given_config", lambda: (source, {}))
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    assert ended.value.code == 1
    assert "3 of 3 points failed:\n  seed=0: RuntimeError: planted" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_ends_in_one_line(tmp_path, monkeypatch, capsys):
    def refused(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(report, "write", refused)
    monkeypatch.setattr(report.flags, "FLAGS", SimpleNamespace(workdir=str(tmp_path)))
    with pytest.raises(SystemExit) as ended:
        report.main()
    assert ended.value.code == 2
    assert "Permission denied" in capsys.readouterr().err


def test_a_package_that_is_missing_has_one_remedy():
    unknown = ModuleNotFoundError("No module named 'pandas'")
    assert (
        cli.in_one_line(unknown)
        == f'{unknown}: in the clone of dpx, pip install -e ".[data,plots]"'
    )
    known = ModuleNotFoundError("GGUF files need gguf: pip install gguf")
    assert cli.in_one_line(known) == str(known)


@pytest.mark.parametrize("name", ["Smith!", "Smith", "a" * 14])
def test_names_that_cannot_be_encoded_are_named(name):
    with pytest.raises(ValueError, match="at most 13 letters a–z"):
        surnames.encode(["smith", name])
    assert np.all(surnames.encode(["smith"]).tokens[0, 5:] == surnames.END)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config.nonsense=1",), "nonsense"),
        (("--config.epsilon=0",), "epsilon"),
        (("--config.epsilon=x",), "epsilon"),
        (("--config.train.batch_size=100000",), "sampling probability"),
        (("--config.data.path=absent.txt",), "no such file"),
        (("--config.data.path=BROKEN",), "line 3"),
        (("extra",), "extra"),
        (("--config.data.user=a",), "use configs/recommender.py:table,tiny"),
        (("--config.experiment=gram.own_matrix",), "fixed by the config file"),
        (("--workdir=",), "--workdir is missing"),
    ],
)
def test_bad_flags_end_in_one_line_and_status_2(zygote, tmp_path, arguments, words):
    broken = tmp_path / "broken.txt"
    broken.write_text("1 2\n1 3\n1 x\n")
    arguments = [argument.replace("BROKEN", str(broken)) for argument in arguments]
    kind = "amazon" if any("data.path" in argument for argument in arguments) else "synthetic"
    workdir = tmp_path / "run"
    source = f"--config=configs/recommender.py:{kind},tiny"
    status, stderr, _ = zygote.start(
        "run", source, f"--workdir={workdir}", *arguments, folder=tmp_path
    )
    assert status == 2
    assert words in stderr
    lines = [line for line in stderr.splitlines() if not line.startswith(("W", "I"))]
    assert len(lines) == 1, stderr
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
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
    ],
)
def test_bad_values_are_named_before_anything_runs(changed, named):
    config = records.load_config("configs/quickstart.py:tiny")
    config.update_from_flattened_dict(changed)
    with pytest.raises(ValueError, match=re.escape(named)):
        run.check(config)


@pytest.mark.parametrize("source", ["recommender.py:amazon,tiny", "gram.py:recommender,tiny"])
def test_histories_too_short_to_hold_an_item_out_are_named(tmp_path, source):
    path = tmp_path / "short.txt"
    path.write_text("1 1\n1 2\n2 1\n2 3\n")
    config = records.load_config(f"configs/{source}")
    config.data.path = str(path)
    with pytest.raises(ValueError, match="no user of three items"):
        run.check(config)


@pytest.mark.slow
def test_a_home_folder_is_found_and_output_fits_any_locale(tmp_path):
    """Shells leave the ~ of `--workdir=~/run` to the program, and who then cleans up types `rm -r ~`."""
    home, where = tmp_path / "home", tmp_path / "where"
    folder = home / "run"
    folder.mkdir(parents=True)
    where.mkdir()
    relation = dpx.privacy.REPLACE_ONE
    spent = dpx.PrivacyGuarantee(1.0, 1e-6, relation, "row", "test")
    config = records.load_config("gram:tiny")
    run.prepare(config, "gram:tiny", folder)
    outcome = Outcome([Measure("a", "b", 1.0)], spent, {"a": spent})
    run.write(outcome, config, folder, 1.0)
    ended = subprocess.run(
        [sys.executable, "-c", DPX, "report", "--workdir=~/run"],
        cwd=where,
        env={
            **os.environ,
            "HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "PYTHONIOENCODING": "latin-1",
        },
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"\\u03b5 = 1" in ended.stdout
    assert not list(where.iterdir())


@pytest.mark.slow
def test_dry_run_prints_the_privacy_parameters_and_writes_nothing(tmp_path):
    source = "--config=configs/quickstart.py:tiny"
    ended = call("run", source, "--dry_run", "--config.delta=0.1", f"--workdir={tmp_path / 'run'}")
    assert ended.returncode == 0, ended.stderr
    for name in ("noise_multiplier", "sampling_probability", "steps", "epsilon"):
        assert f"{name}: " in ended.stdout
    assert "  dp_2gram: ε = 3, δ = 0.1\n" in ended.stdout
    total = re.search(r"planned total of all releases: ε = ([\d.]+), δ = 0.1", ended.stdout)
    assert total is not None
    assert float(total[1]) > 4  # two n-gram models and a transformer, at ε = 3 each
    assert "warning: delta=0.1 exceeds 1/2000" in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_dry_run_of_a_sweep_adds_up_its_points_and_writes_nothing(tmp_path):
    flags = ["--config=gram:tiny", "--set=epsilon=1,2", "--dry_run"]
    ended = call("sweep", *flags, f"--workdir={tmp_path / 'sweep'}")
    assert ended.returncode == 0, ended.stderr
    costs = [float(cost) for cost in re.findall(r"^epsilon=[12]: ε = ([\d.]+)", ended.stdout, re.M)]
    total = re.search(r"planned total of 2 points, .*: ε = ([\d.]+)", ended.stdout)
    assert total is not None
    assert float(total[1]) == pytest.approx(sum(costs), rel=1e-5)
    assert 0 < costs[0] < costs[1]
    assert not (tmp_path / "sweep").exists()
    ended = call("sweep", *flags, "--select=x", "--trials=poisson:2")
    assert "--dry_run must be left out with --select" in ended.stderr


@pytest.mark.slow
def test_an_interrupt_before_anything_has_begun_ends_in_one_line():
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'jax':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from dpx._command import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "run", "--config=quickstart:tiny"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
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
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "1 of 1 done" in (tmp_path / "sweep" / "log.txt").read_text()


def test_output_that_nobody_reads_any_more_is_no_error():
    code = (
        "from dpx.launch import cli\n"
        "try:\n"
        "    while True:\n"
        "        print('a line')\n"
        "except OSError as error:\n"
        "    cli.stop(error)\n"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
