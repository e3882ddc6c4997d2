"""Every config and variant that comes with dpx, made to run in seconds: those that need a file get one."""

import numpy as np

from dpx.data import synthetic_histories
from dpx.runs import records, run, sources


def all_sources():
    """Every config with each of its variants, `tiny`, found in the folder and not listed by hand."""
    for name in sources.names():
        variants = getattr(records.config_module(name), "VARIANTS", ())
        yield from [f"{name}:{variant},tiny" for variant in variants] or [f"{name}:tiny"]


def _ratings(folder, separator):
    path = folder / "ratings.dat"
    lines = []
    for user, items in enumerate(synthetic_histories(60, 6, 15, seed=2).items):
        for time, item in enumerate(items):
            fields = (user + 1, item + 1) if separator == " " else (user + 1, item + 1, 5, time)
            lines.append(separator.join(map(str, fields)))
    path.write_text("\n".join(lines))
    return {"data.path": str(path), "data.min_count": 0}


def _table(folder):
    path = folder / "ratings.csv"
    lines = ["user,item,time"]
    for user, items in enumerate(synthetic_histories(60, 6, 15, seed=2).items):
        lines += [f"u{user},item {item},{time}" for time, item in enumerate(items)]
    path.write_text("\n".join(lines))
    return {"data.path": str(path), "data.time": "time"}


def _matrix(folder):
    np.save(folder / "X.npy", np.random.default_rng(0).uniform(-1, 1, (3, 40)))
    return {"data.path": str(folder / "X.npy"), "column_bound": 1.5}


def _memory(folder):
    rng = np.random.default_rng(0)
    K, V = rng.uniform(0, 1, (60, 2)), rng.uniform(-1, 1, (60, 1))
    np.savez(folder / "memory.npz", K=K, V=V)
    return {"data.path": str(folder / "memory.npz"), "key_bound": 1.0, "value_bound": 1.0}


def _prompts(folder):
    rng = np.random.default_rng(0)
    np.savez(folder / "prompts.npz", x=rng.random((40, 4, 5)), y=rng.uniform(-1, 1, (40, 4)))
    return {"data.path": str(folder / "prompts.npz")}


def _labelled(folder):
    rows = [
        f"{'bad' if i % 3 else 'good'} w{i % 7} w{i % 5},{'no' if i % 3 else 'yes'},u{i * i % 83}"
        for i in range(200)
    ]
    (folder / "texts.csv").write_text("\n".join(["message,team,who", *rows]))
    found = {"data.path": str(folder / "texts.csv"), "data.text": "message", "data.label": "team"}
    return found | {"data.labels": ("no", "yes")}


FILES = {
    "classify:table,tiny": _labelled,
    "recommender:movielens1m,tiny": lambda folder: _ratings(folder, "::"),
    "recommender:amazon,tiny": lambda folder: _ratings(folder, " "),
    "recommender:amazon_warm,tiny": lambda folder: _ratings(folder, " "),
    "recommender:table,tiny": _table,
    "gram:recommender,tiny": lambda folder: _ratings(folder, " "),
    "gram:table,tiny": _matrix,
    "cross_attention:table,tiny": _memory,
    "noisy_head:text,tiny": _prompts,
}


def configured(source, folder, **changes):
    """The config of a source, which reads a file in the folder where it needs one."""
    config = records.load_config(source)
    given = FILES[source](folder) if source in FILES else {}
    config.update_from_flattened_dict(given | changes)
    return config


def executed(config, source, workdir):
    """The record of a whole run."""
    run.prepare(config, source, workdir)
    return run.execute(config, workdir)
