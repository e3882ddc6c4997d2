"""What else releases follow from than private records: a run that resumes has to find it unchanged."""

import numpy as np
import pytest

from dpx.runs import records
from dpx.training import keys, resuming
from experiments.cross_attention import labelled
from experiments.dp_transformer import finetune, tuned_text
from experiments.dp_transformer import histories as recommender_data


class Opened(Exception):
    """A run has asked for its keys, and would draw noise."""


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """The digest of what a run of a config begins with."""

    def stop(config, workdir, *, synthetic=False, data=()):
        raise Opened(resuming.digest(data))

    monkeypatch.setattr(keys, "open_keys", stop)
    monkeypatch.setattr(finetune, "open_keys", stop)

    def run(config):
        with pytest.raises(Opened) as found:
            records.experiment(config).run(config, tmp_path)
        return str(found.value)

    return run


def config_of_texts(name, folder):
    config = records.load_config(name)
    config.data.update({"generated": 0, "record": "line", "path": str(folder / "private.txt")})
    config.data.test_path = str(folder / "public.txt")
    (folder / "private.txt").write_text("tea and milk\nbread and cake\n" * 8)
    (folder / "public.txt").write_text("tea\nmilk\nsalt\n" * 8)
    return config


@pytest.mark.slow
def test_a_memory_follows_from_public_documents(begun, tmp_path):
    config = config_of_texts("next_tokens:tiny", tmp_path)
    first = begun(config)
    assert begun(config) == first
    (tmp_path / "public.txt").write_text("tea\nmilk\npepper\n" * 8)
    assert begun(config) != first


@pytest.mark.parametrize("name", ["next_tokens:tiny", "finetune:tiny"])
def test_texts_are_read_by_a_model(begun, tmp_path, monkeypatch, name):
    config = config_of_texts(name, tmp_path)
    first = begun(config)
    if name == "finetune:tiny":  # the trials of a selection have to begin with the same
        config.train.batch_size = 4
        assert finetune.candidate(config).data == first
    monkeypatch.setattr(tuned_text, "model_files", lambda config: [np.ones(3, np.uint8)])
    assert begun(config) != first


@pytest.mark.parametrize("name", ["model.gguf", "folder/model-00002-of-00002.safetensors"])
def test_a_model_is_known_by_the_bytes_of_its_files(tmp_path, name):
    config = records.load_config("finetune:tiny")
    assert tuned_text.model_files(config) == []
    config.model.kind, config.model.path = "pretrained", str(tmp_path / name.partition("/")[0])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"weights")
    assert tuned_text.model_files(config)[-1].tobytes() == b"weights"
    first = resuming.digest(tuned_text.model_files(config))
    (tmp_path / name).write_bytes(b"Weights")
    assert resuming.digest(tuned_text.model_files(config)) != first


@pytest.mark.parametrize(
    ("name", "public"),
    [("cross_attention:retrieval,tiny", "queries"), ("gram:features,tiny", "public")],
)
def test_releases_follow_from_documents_that_are_not_private(begun, monkeypatch, name, public):
    config, load = records.load_config(name), labelled.load
    first = begun(config)

    def other(config):
        found = load(config)
        return found._replace(**{public: getattr(found, public)[:, ::-1]})

    monkeypatch.setattr(labelled, "load", other)
    assert begun(config) != first


@pytest.mark.parametrize("column", [-1, -2])
def test_what_a_recommender_serves_follows_from_items_that_are_held_out(begun, tmp_path, column):
    config, path = records.load_config("recommender:amazon,tiny"), tmp_path / "items.txt"
    config.data.path = str(path)
    items = np.array([np.roll(range(1, 13), user) for user in range(30)])

    def digest():
        path.write_text("\n".join(f"{u + 1} {i}" for u, row in enumerate(items) for i in row))
        recommender_data._loaded.cache_clear()  # as another process would read it
        return begun(config)

    first = digest()
    items[3, column] = items[3, 0]
    assert digest() != first


@pytest.mark.parametrize("name", ["recommender:amazon,tiny", "gram:recommender,tiny"])
def test_what_is_kept_follows_from_the_size_of_the_catalogue(begun, tmp_path, name):
    config, path = records.load_config(name), tmp_path / "items.txt"
    config.data.path = str(path)
    lines = [f"{user} {item}" for user in range(1, 31) for item in np.roll(range(1, 13), user)]

    def digest():
        path.write_text("\n".join(lines))
        recommender_data._loaded.cache_clear()  # as another process would read it
        return begun(config)

    first = digest()
    lines[-1] = "30 13"  # held out, and a new item
    assert digest() != first
