"""Figures of the recommender, drawn from finished runs: during training, and over two grids."""

import json
from pathlib import Path

import numpy as np
from scipy import stats

from dpx.launch import plotting

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


def during_training(records, folder: Path) -> list[Path]:
    """NDCG and HIT against the step: the mean over repetitions and its standard error (Figure 4)."""
    paths = []
    for record in records:
        curves = _curves(record)
        if not curves:
            continue
        figure, panels = plotting.pyplot().subplots(1, 2, figsize=(11, 4), constrained_layout=True)
        for panel, name in zip(panels, metric_names(record), strict=True):
            for row, seeds in sorted(curves.items()):
                steps = sorted(set.intersection(*(set(seed) for seed in seeds)))
                values = 100 * np.array([[seed[step][name] for step in steps] for seed in seeds])
                center = values.mean(axis=0)
                (line,) = panel.plot(steps, center, label=LABELS.get(row, row))
                if len(seeds) > 1:
                    error = stats.sem(values, axis=0)
                    shade = {"color": line.get_color(), "alpha": 0.2, "linewidth": 0}
                    panel.fill_between(steps, center - error, center + error, **shade)
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.set(xlabel="step", ylabel=f"{name.upper()} in %")
        _legend_beside(panels[-1])
        suffix = f"{record.config['epsilon']:g}_{record.workdir.name}"
        paths.append(
            plotting.save(figure, folder / f"recommender_curves_{suffix}.png", record.title())
        )
    return paths


def sharing(records, folder: Path) -> list[Path]:
    """NDCG with a shared embedding, with a head of its own, and at the widths there are (Figure 7)."""
    bars = {}
    for record in records:
        model = record.config["model"]
        words = "shared" if model["tied"] else "not shared"
        bars.setdefault((model["dim"], words), []).append(record)
    if len({words for _, words in bars}) < 2:
        return []
    name = metric_names(records[0])[0]
    figure, axes = plotting.pyplot().subplots(figsize=(6, 4), constrained_layout=True)
    for position, ((_, words), runs) in enumerate(sorted(bars.items())):
        found = mean(runs, f"dp_{runs[0].config['model']['kind']}", name)
        if found:
            color = "C0" if words == "shared" else "C1"
            axes.bar(position, found[0], yerr=found[1], color=color, alpha=0.6, capsize=4)
    axes.set_xticks(range(len(bars)), [f"{words}, d = {dim}" for dim, words in sorted(bars)])
    axes.set(ylabel=f"{name.upper()} in %")
    words = "The items' embedding as input and as output"
    return [plotting.save(figure, folder / "recommender_sharing.png", words)]


def grid(records, folder: Path) -> list[Path]:
    """A heat map over batch sizes and learning rates at each ε (Figure 9)."""
    paths = []
    name = metric_names(records[0])[0] if records else ""
    for epsilon in sorted({record.config["epsilon"] for record in records}):
        cells = {}
        for record in (r for r in records if r.config["epsilon"] == epsilon):
            train = record.config["train"]
            if train["batch_size"] is not None:
                place = (train["batch_size"], train["learning_rate"])
                cells.setdefault(place, []).append(record)
        batches, rates = (sorted({place[axis] for place in cells}) for axis in (0, 1))
        if len(batches) < 2 or len(rates) < 2:
            continue
        table = np.full((len(batches), len(rates)), np.nan)
        for (batch, rate), runs in cells.items():
            found = mean(runs, f"dp_{runs[0].config['model']['kind']}", name)
            if found:
                table[batches.index(batch), rates.index(rate)] = found[0]
        figure, axes = plotting.pyplot().subplots(
            figsize=(3 + len(rates), 1.5 + len(batches)), constrained_layout=True
        )
        image = axes.imshow(table, origin="lower", cmap="viridis")
        figure.colorbar(image, ax=axes, label=f"{name.upper()} in %")
        for (row, column), value in np.ndenumerate(table):
            if np.isfinite(value):
                color = "w" if value < np.nanmean(table) else "k"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
        axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
        split = records[0].config["evaluate"]["split"]
        axes.set(xlabel="learning rate", ylabel="batch size")
        words = f"{split} item, ε = {epsilon:g}"
        paths.append(plotting.save(figure, folder / f"recommender_grid_{epsilon:g}.png", words))
    return paths


def mean(records, row: str, metric: str) -> tuple[float, float] | None:
    """A measure in percent, averaged over runs, and its standard error; None where no run has it.

    The error is that over the runs where there are several, else that over repetitions within the run, and 0
    where there was one repetition.
    """
    found = [m for r in records for m in r.measures if (m.row, m.metric) == (row, metric)]
    if not found:
        return None
    values = [100 * measure.value for measure in found]
    error = stats.sem(values) if len(found) > 1 else 100 * (found[0].error or 0.0)
    return float(np.mean(values)), float(error)


def metric_names(record) -> tuple[str, str]:
    """The names of NDCG and HIT at the k of a run."""
    k = record.config["evaluate"]["k"]
    return f"ndcg@{k}", f"hit@{k}"


def _legend_beside(panel) -> None:
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _curves(record) -> dict[str, list[dict[int, dict]]]:
    """For each trained row, for each seed, the evaluations by step."""
    path = record.workdir / "metrics.jsonl"
    runs: dict[str, dict[int, dict]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        entry = json.loads(line)
        if metric_names(record)[0] in entry:
            runs.setdefault(entry["run"], {})[entry["step"]] = entry
    curves: dict[str, list[dict[int, dict]]] = {}
    for label, steps in runs.items():
        curves.setdefault(label.split("_seed")[0], []).append(steps)
    return curves
