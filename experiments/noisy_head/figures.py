"""Figures of the NoisyHead experiments, drawn from finished runs."""

from pathlib import Path

from dpx.launch import plotting

AXIS_NAMES = {
    "num_prompts": "prompts N",
    "length": "length L",
    "dim": "dimension D",
    "epsilon": "ε",
}


def along_axes(record, folder: Path) -> list[Path]:
    """Excess risk against each axis of a run: a curve per fit and ε, bars of two standard deviations."""
    points = parse(record.metrics)
    paths = []
    for axis in record.config["axes"]:
        curves: dict[str, list[tuple[float, float, float]]] = {}
        for (where, position, epsilon, name), values in points.items():
            if where != axis or "excess_risk" not in values or name == "ridge":
                continue
            by_epsilon = axis == "epsilon"
            x = epsilon if by_epsilon else position
            label = name if by_epsilon or epsilon is None else f"{name}, ε = {epsilon:g}"
            spread = values.get("excess_risk_std", 0.0) if name == "paper" else 0.0
            if x is not None:
                curves.setdefault(label, []).append((x, values["excess_risk"], 2 * spread))
        figure, axes = plotting.pyplot().subplots(figsize=(7, 5))
        for label, series in sorted(curves.items()):
            x, y, bar = zip(*sorted(series), strict=True)
            # On a logarithmic axis a bar may not reach zero.
            lower = [min(b, 0.9 * value) for b, value in zip(bar, y, strict=True)]
            axes.errorbar(x, y, yerr=[lower, bar], label=label, capsize=2, marker=".", linewidth=1)
        axes.set(xlabel=AXIS_NAMES[axis], ylabel="excess risk over ridge", yscale="log")
        if axis == "epsilon":
            axes.set_xscale("log")
        axes.legend(fontsize=6, ncols=2)
        paths.append(
            plotting.save(figure, folder / f"excess_risk_{axis}_{record.workdir.name}.png")
        )
    return paths


def curves(record, folder: Path, *, xlabel: str, ylabel: str, name: str) -> list[Path]:
    """Metrics named `series/x` as one curve per series, on logarithmic axes of risk."""
    series: dict[str, list[tuple[float, float]]] = {}
    for metric, value in record.metrics.items():
        label, _, x = metric.rpartition("/")
        if x[:1] in "Tp" and _is_number(x[1:]) and value > 0:
            series.setdefault(label, []).append((float(x[1:]), value))
    figure, axes = plotting.pyplot().subplots(figsize=(7, 5))
    for label, points in series.items():
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, label=label, marker=".", linewidth=1)
    axes.set(xlabel=xlabel, ylabel=ylabel, yscale="log")
    axes.legend(fontsize=7)
    return [plotting.save(figure, folder / f"{name}_{record.workdir.name}.png")]


def parse(metrics: dict[str, float]) -> dict[tuple, dict[str, float]]:
    """(axis, position, ε, fit) -> {what: value}, from names as num_prompts1000/epsilon0.2/paper/test_mse."""
    points: dict[tuple, dict[str, float]] = {}
    for metric, value in metrics.items():
        *place, name, what = metric.split("/")
        axis, position, epsilon = "epsilon", None, None
        for part in place:
            for known in AXIS_NAMES:
                if part.startswith(known) and _is_number(part[len(known) :]):
                    number = float(part[len(known) :])
                    if known == "epsilon":
                        epsilon = number
                    else:
                        axis, position = known, number
        points.setdefault((axis, position, epsilon, name), {})[what] = value
    return points


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
