"""No two releases of a config draw with one key, and keys follow from names and not from an order."""

import ast
from pathlib import Path

import jax
import numpy as np
import pytest

from dpx import audit
from dpx.data import Histories
from dpx.launch import records, run, sources
from dpx.training.keys import Keys
from dpx.training.purposes import from_seed
from experiments.cross_attention import kernel_regression, reader
from experiments.cross_attention import query_error as cross_attention
from experiments.dp_transformer import histories as recommender_data
from experiments.noisy_head import texts

ROOT = Path(__file__).parents[2]
# Where experiments divide a key by number, and why no two releases share one for it.
BY_NUMBER = {
    "audit/canaries.py": "thousands of runs of one audit, on made-up data",
    "audit/training_faults.py": "a planted fault",
    "cross_attention/reader.py": "made-up tasks, of public training",
    "dp_transformer/distraction.py": "fresh noise in a finished model, which is not released",
    "gram/attention_error.py": "draws of an error, on made-up data",
    "gram/features.py": "steps of one release",
    "noisy_head/early_stopping.py": "simulated prompts, on which fits are paired",
    "noisy_head/excess_risk.py": "simulated prompts, on which fits are paired",
    "noisy_head/robustness.py": "simulated prompts, on which fits are paired",
}
# Their data are simulated from the public seed and their keys with them, or thousands of runs are audited.
NO_RUN_KEYS = {
    "audit": "an audit releases made-up data thousands of times",
    **{
        f"noisy_head:{variant}": "trials are simulated from the seed, and paired"
        for variant in ("low_dim", "high_dim", "useful", "rates", "early_stopping", "robustness")
    },
}


def divided(path):
    """Whether a program divides a key, or the seed of samples, by number."""
    names = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    text = path.read_text()
    return bool({"fold_in", "spawn"} & names) or "random.split" in text


def test_experiments_do_not_divide_keys_by_number():
    """A copied number, or an order that changes, gives two releases one key; a name cannot."""
    found = {
        str(path.relative_to(ROOT / "experiments"))
        for path in (ROOT / "experiments").rglob("*.py")
        if "bench" not in path.parts and divided(path)
    }
    assert found == set(BY_NUMBER)


def users():
    rng = np.random.default_rng(0)
    return Histories(
        tuple(rng.integers(0, 12, rng.integers(4, 9)).astype(np.int32) for _ in range(60)), 12
    )


SMALL = {
    "train.steps": 2,
    "train.batch_size": 8,
    "train.microbatch_size": 8,
    "train.log_every": 2,
    "non_private.steps": 1,
    "non_private.batch_size": 8,
    "data.limit": 120,
    "num_seeds": 2,
    "trials": 2,
    "ngrams": (1, 2),
    "reattention.enabled": True,
    "reattention.probabilities": "release",
    "sample.count": 1,
    "sample.length": 2,
}
OWN = {
    "recommender:movielens1m": {"data.path": "ml-1m"},
    "recommender:amazon": {"data.path": "ratings.txt"},
    "recommender:amazon_warm": {"data.path": "ratings.txt"},
    "recommender:table": {"data.path": "t.csv", "data.user": "user", "data.item": "item"},
    "gram:recommender": {"data.path": "ratings.txt", "num_kept": 8},
    "gram:table": {"column_bound": 1.5},
    "gram:error": {"columns": 40},
    "noisy_head:text": {"data.path": "."},
    "reattention": {"sequences": 4, "data.num_users": 40},
}


def configured(source, folder, monkeypatch):
    """A config at `tiny`, as small as it can be, on data that need no file from elsewhere."""
    name = source.removesuffix(",tiny").removesuffix(":tiny")
    config = records.load_config(source)
    known = records.flatten(config)
    changes = {key: value for key, value in SMALL.items() if key in known} | OWN.get(name, {})
    rng = np.random.default_rng(0)
    if name == "gram:table":
        np.save(folder / "x.npy", rng.uniform(-1, 1, (3, 40)))
        changes["data.path"] = str(folder / "x.npy")
    if name == "cross_attention:table":
        np.savez(folder / "x.npz", K=rng.random((30, 2)), V=rng.random((30, 1)))
        changes |= {"data.path": str(folder / "x.npz"), "data.key": "K", "data.value": "V"}
        changes |= {"key_bound": 1.0, "value_bound": 1.0}
    if name == "classify:table":
        rows = "".join(f"word{i % 7} of a text {i},{'ab'[i % 2]}\n" for i in range(300))
        (folder / "texts.csv").write_text("text,label\n" + rows)
        changes |= {"data.path": str(folder / "texts.csv")}
        changes |= {"data.text": "text", "data.label": "label", "data.labels": ("a", "b")}
    if name == "text":
        (folder / "lines.txt").write_text("".join(f"line {i} of many\n" for i in range(300)))
        changes["data.path"] = str(folder / "lines.txt")
    if name == "noisy_head:text":
        prompts = texts.noisy_head.Prompts(
            rng.random((30, config.length + 1, config.dim)), rng.random((30, config.length + 1))
        )
        monkeypatch.setattr(texts, "read", lambda config: (prompts, prompts))
    if name.split(":")[0] == "recommender" or name == "gram:recommender":
        monkeypatch.setattr(recommender_data, "load", lambda config: users())
    rows = rng.uniform([0.2, 50, 50, 300], [5, 75, 80, 19_000], (60, 4))
    for module in (kernel_regression, reader):
        monkeypatch.setattr(module, "load_diamonds", lambda config: (rows, rows[:10]))
    # Timing makes each release twice, bit by bit the same: once is enough here.
    monkeypatch.setattr(cross_attention, "_timed", lambda call: (call(), 0.0))
    config.update_from_flattened_dict(changes | {"noise_seed": 5})
    return config


def sources_at_tiny():
    for name in sources.names():
        for variant in getattr(records.config_module(name), "VARIANTS", ("",)):
            if name not in NO_RUN_KEYS and f"{name}:{variant}" not in NO_RUN_KEYS:
                yield f"{name}:{variant},tiny" if variant else f"{name}:tiny"


@pytest.fixture(scope="module")
def recording():
    with audit.recording():
        yield


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, marks=() if source == "gram:table,tiny" else pytest.mark.slow)
        for source in sources_at_tiny()
    ],
)
def test_no_two_releases_of_a_config_share_a_key(source, tmp_path, monkeypatch, recording):
    config, given = configured(source, tmp_path, monkeypatch), {}

    def spying(draw):
        def drawn(self, name, *more, **settings):
            given[draw.__name__, name] = draw(self, name, *more, **settings)
            return given[draw.__name__, name]

        return drawn

    for draw in (Keys.noise, Keys.seed, Keys.training):
        monkeypatch.setattr(Keys, draw.__name__, spying(draw))

    def whole(_, workdir):
        run.prepare(config, source, workdir)
        run.execute(config, workdir)

    found = audit.record(whole, None, ignore=["*"])
    assert found.releases
    assert not found.shared_keys()
    monkeypatch.undo()
    assert len(set(words(list(given.values())))) == len(words(list(given.values())))
    # In another order, a name has the key that it had.
    other = from_seed(config.noise_seed)
    for (draw, name), drawn in reversed(given.items()):
        assert words(getattr(other, draw)(name)) == words(drawn), name


def words(drawn):
    """Of each key and each seed."""
    return [
        str(leaf.entropy if isinstance(leaf, np.random.SeedSequence) else jax.random.key_data(leaf))
        for leaf in jax.tree.leaves(drawn)
    ]
