"""Figures of the recommender, drawn from finished runs: during training, and over two grids."""

from collections.abc import Iterator
from pathlib import Path

from dpx import _storage as storage
from dpx.runs.experiment import Measure
from experiments import lines
from experiments.lines import Panel, Point

LABELS = {
    "popularity": "popularity, no privacy",
    "dp_popularity": "DP popularity",
    "transitions": "DP transitions",
    "start": "before training",
    "dp_transformer": "DP transformer",
    "dp_reattention": "Re-Attention",
    "dp_gru": "DP GRU",
    "dp_lstm": "DP LSTM",
    "served": "what dpx recommend serves",
    "transformer": "transformer, no privacy",
    "gru": "GRU, no privacy",
    "lstm": "LSTM, no privacy",
}


def draw(records, folder: Path) -> list[Path]:
    """What the records at hand allow of Figures 4, 7 and 9 of the paper."""
    return [path for figure in (during_training, sharing, grid) for path in figure(records, folder)]


def during_training(records, folder: Path) -> Iterator[Path]:
    """NDCG and HIT against the step: the mean over repetitions and its standard error (Figure 4)."""
    for record in records:
        log, names = record.workdir / "metrics.jsonl", metric_names(record)
        found = [x for x in (storage.read_lines(log) if log.exists() else ()) if names[0] in x]
        if not found:
            continue
        panels = []
        for name in names:
            points = [
                Point(Measure(x["run"].split("_seed")[0], name, 100 * x[name]), x["step"])
                for x in found
            ]
            panels.append(Panel(points, "step", f"{name.upper()} in %"))
        path = f"recommender_curves_{record.config['epsilon']:g}_{record.workdir.name}.png"
        yield lines.draw(folder / path, record.title(), panels, LABELS)


def sharing(records, folder: Path) -> Iterator[Path]:
    """NDCG with a shared embedding, and with a head of its own, at the widths there are (Figure 7)."""
    if len({record.config["model"]["tied"] for record in records}) < 2:
        return
    points = [
        Point(measure, model["dim"], "shared" if model["tied"] else "not shared")
        for record in records
        for model, measure in ((record.config["model"], x) for x in _ndcg(record))
    ]
    panel = Panel(points, "width d", f"{metric_names(records[0])[0].upper()} in %")
    title = "The items' embedding as input and as output"
    yield lines.draw(folder / "recommender_sharing.png", title, [panel], LABELS)


def grid(records, folder: Path) -> Iterator[Path]:
    """NDCG over batch sizes and learning rates at each ε (Figure 9)."""
    for epsilon in sorted({record.config["epsilon"] for record in records}):
        points = []
        for record in (r for r in records if r.config["epsilon"] == epsilon):
            train = record.config["train"]
            if train["batch_size"] is not None:
                rate = f"learning rate {train['learning_rate']:g}"
                points += [Point(x, train["batch_size"], rate) for x in _ndcg(record)]
        if min(len({point.x for point in points}), len({point.marker for point in points})) < 2:
            continue
        words = f"{records[0].config['evaluate']['split']} item, ε = {epsilon:g}"
        panel = Panel(points, "batch size", f"{metric_names(records[0])[0].upper()} in %")
        path = folder / f"recommender_grid_{epsilon:g}.png"
        yield lines.draw(path, words, [panel], LABELS)


def _ndcg(record) -> Iterator[Measure]:
    """The NDCG of a run's private model, in percent."""
    name, row = metric_names(record)[0], f"dp_{record.config['model']['kind']}"
    for found in record.measures:
        if (found.row, found.metric) == (row, name):
            error = None if found.error is None else 100 * found.error
            yield Measure(row, name, 100 * found.value, error)


def metric_names(record) -> tuple[str, str]:
    """The names of NDCG and HIT at the k of a run."""
    k = record.config["evaluate"]["k"]
    return f"ndcg@{k}", f"hit@{k}"
