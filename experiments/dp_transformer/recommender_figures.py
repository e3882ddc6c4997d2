"""Figures of the recommender, drawn from finished runs: against ε, during training, over two grids."""

import json
from pathlib import Path

import numpy as np

from dpx.launch import plotting

LABELS = {
    "popularity": "popularity, not private",
    "dp_popularity": "DP popularity",
    "transitions": "transitions, whole budget",
    "start": "start, before training",
    "dp_transformer": "DP transformer",
    "dp_reattention": "DP transformer, Re-Attention",
}


def draw(records, folder: Path) -> list[Path]:
    """What the records at hand allow of Tables 2 and 3 and of Figures 4, 7 and 9 of the paper."""
    return [
        path
        for figure in (against_epsilon, during_training, sharing, grid)
        for path in figure(records, folder)
    ]


def against_epsilon(records, folder: Path) -> list[Path]:
    """NDCG and HIT of every row against ε, with standard errors over seeds (Tables 2 and 3)."""
    if len({record.config["epsilon"] for record in records}) < 2:
        return []
    records = sorted(records, key=lambda record: record.config["epsilon"])
    figure, panels = plotting.pyplot().subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for panel, name in zip(panels, _names(records[0]), strict=True):
        for row in _rows(records, name):
            found = [record for record in records if f"{row}/{name}" in record.metrics]
            panel.errorbar(
                [record.config["epsilon"] for record in found],
                [100 * record.metrics[f"{row}/{name}"] for record in found],
                yerr=[100 * record.metrics.get(f"{row}/{name}_se", 0.0) for record in found],
                marker="o",
                markersize=3,
                capsize=2,
                label=LABELS.get(row, row),
            )
        panel.set(xlabel="ε", ylabel=f"{name.upper()} in %")
    panels[0].legend(fontsize=7)
    return [plotting.save(figure, folder / "recommender_epsilon.png")]


def during_training(records, folder: Path) -> list[Path]:
    """NDCG and HIT against the step: the mean over seeds, and where 60 to 100 % of them lie (Figure 4)."""
    paths = []
    for record in records:
        curves = _curves(record)
        if not curves:
            continue
        figure, panels = plotting.pyplot().subplots(1, 2, figsize=(11, 4), constrained_layout=True)
        for panel, name in zip(panels, _names(record), strict=True):
            for color, (row, seeds) in enumerate(sorted(curves.items())):
                steps = sorted(set.intersection(*(set(seed) for seed in seeds)))
                values = 100 * np.array([[seed[step][name] for step in steps] for seed in seeds])
                label = LABELS.get(row, row)
                panel.plot(steps, values.mean(axis=0), color=f"C{color}", label=label)
                for share in (60, 80, 100):
                    low, high = np.percentile(values, (50 - share / 2, 50 + share / 2), axis=0)
                    panel.fill_between(steps, low, high, color=f"C{color}", alpha=0.12, linewidth=0)
            panel.set(xlabel="step", ylabel=f"{name.upper()} in %")
        panels[0].legend(fontsize=7)
        suffix = f"{record.config['epsilon']:g}_{record.workdir.name}"
        paths.append(plotting.save(figure, folder / f"recommender_curves_{suffix}.png"))
    return paths


def sharing(records, folder: Path) -> list[Path]:
    """NDCG with a shared embedding, with a head of its own, and at the widths there are (Figure 7)."""
    bars = {}
    for record in records:
        model, name = record.config["model"], _names(record)[0]
        row = f"dp_{model['kind']}/{name}"
        if row in record.metrics:
            words = "shared" if model["tied"] else "not shared"
            bars.setdefault(f"{words}, d = {model['dim']}", []).append(100 * record.metrics[row])
    if len({label.split(",")[0] for label in bars}) < 2:
        return []
    figure, axes = plotting.pyplot().subplots(figsize=(6, 4), constrained_layout=True)
    for position, (_, values) in enumerate(sorted(bars.items())):
        axes.bar(position, np.mean(values), color="C0", alpha=0.4)
        axes.plot([position] * len(values), values, "k.")
    axes.set_xticks(range(len(bars)), sorted(bars))
    axes.set(ylabel=f"{_names(records[0])[0].upper()} in %", title="each dot a run")
    return [plotting.save(figure, folder / "recommender_sharing.png")]


def grid(records, folder: Path) -> list[Path]:
    """A heat map over batch sizes and learning rates at each ε (Figure 9)."""
    paths = []
    for epsilon in sorted({record.config["epsilon"] for record in records}):
        cells = {}
        for record in records:
            train, kind = record.config["train"], record.config["model"]["kind"]
            row = f"dp_{kind}/{_names(record)[0]}"
            if record.config["epsilon"] == epsilon and row in record.metrics:
                place = (train["batch_size"], train["learning_rate"])
                cells.setdefault(place, []).append(100 * record.metrics[row])
        batches, rates = (sorted({place[axis] for place in cells}) for axis in (0, 1))
        if len(batches) < 2 or len(rates) < 2:
            continue
        table = np.full((len(batches), len(rates)), np.nan)
        for (batch, rate), values in cells.items():
            table[batches.index(batch), rates.index(rate)] = np.mean(values)
        figure, axes = plotting.pyplot().subplots(
            figsize=(1.5 + len(rates), 1.5 + len(batches)), constrained_layout=True
        )
        axes.imshow(table, origin="lower", cmap="viridis")
        for (row, column), value in np.ndenumerate(table):
            if np.isfinite(value):
                color = "w" if value < np.nanmean(table) else "k"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
        axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
        split = records[0].config["evaluate"]["split"]
        title = f"{_names(records[0])[0].upper()} in %, {split} item, ε = {epsilon:g}"
        axes.set(xlabel="learning rate", ylabel="batch size", title=title)
        paths.append(plotting.save(figure, folder / f"recommender_grid_{epsilon:g}.png"))
    return paths


def _curves(record) -> dict[str, list[dict[int, dict]]]:
    """For each trained row, for each seed, the evaluations by step."""
    path = record.workdir / "metrics.jsonl"
    runs: dict[str, dict[int, dict]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        entry = json.loads(line)
        if _names(record)[0] in entry:
            runs.setdefault(entry["run"], {})[entry["step"]] = entry
    curves: dict[str, list[dict[int, dict]]] = {}
    for label, steps in runs.items():
        curves.setdefault(label.split("_seed")[0], []).append(steps)
    return curves


def _names(record) -> tuple[str, str]:
    k = record.config["evaluate"]["k"]
    return f"ndcg@{k}", f"hit@{k}"


def _rows(records, name: str) -> list[str]:
    names = {metric for record in records for metric in record.metrics}
    found = {metric.rpartition("/")[0] for metric in names if metric.endswith(f"/{name}")}
    return sorted(found, key=lambda row: (*LABELS, row).index(row))
