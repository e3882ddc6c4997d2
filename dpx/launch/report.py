"""Tables and figures of the finished runs in a folder.

python -m experiments.report --workdir=DIR       writes report.md, results.csv and *.png
"""

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import ml_collections
import numpy as np
from absl import flags
from dp_accounting import NeighboringRelation

import dpx
from dpx import _storage as storage
from dpx.launch import cli, plotting, records
from dpx.launch.records import Record

# ---------------------------------------------------------------------------------------------
# Tables


def summarize(record: Record) -> str:
    """One run as markdown: its table, what it costs, and its notes."""
    return _section([record], _title(record))


def write(folder: Path) -> str:
    """Writes report.md, results.csv and figures for all finished runs in a folder.

    Returns:
      The report.

    Raises:
      ValueError: if there is none.
    """
    found = records.read_all(folder)
    if not found:
        raise ValueError(f"{folder} holds no finished run")
    sections = [
        _section(group, _title(group[0], skip="seed")) for group in _by_seed(found).values()
    ]
    with storage.lock(folder, wait=60):
        _write_csv(found, folder / "results.csv")
        pictures = [f"![{path.stem}]({path.name})" for path in draw(found, folder)]
        text = "\n\n".join([*sections, *totals(found), *pictures]) + "\n"
        storage.write_text(folder / "report.md", text)
    return text


def _title(record: Record, skip: str = "") -> str:
    changed = [f"{name}={value}" for name, value in record.overrides.items() if name != skip]
    return " ".join([record.source, *changed])


def _by_seed(found: Iterable[Record]) -> dict[str, list[Record]]:
    """Runs that differ in nothing but the seed, together."""
    groups = defaultdict(list)
    for record in found:
        groups[_title(record, skip="seed")].append(record)
    return groups


def totals(found: Iterable[Record]) -> list[str]:
    """For each data set that several runs have used, what these runs cost together, as markdown.

    Runs use one data set where their sections `data` agree, of synthetic data also their seeds. Their totals
    are added up, δ too: the guarantee holds whoever sees them all, and is not the tightest there is.
    """
    groups = defaultdict(list)
    for record in found:
        total = record.total
        data = record.config.get("data", {})
        drawn = (record.config["seed"], record.config["experiment"]) * record.private["synthetic"]
        key = (json.dumps(data, sort_keys=True), drawn, total["unit"], total["neighboring"])
        groups[key].append(record)
    return [_together(group) for group in groups.values() if len(group) > 1]


def _together(group: list[Record]) -> str:
    ledger = dpx.Ledger()
    for record in group:
        spent = record.total
        epsilon = math.inf if spent["epsilon"] is None else spent["epsilon"]
        relation = NeighboringRelation[spent["neighboring"].upper()]
        plain = dpx.PrivacyGuarantee(epsilon, spent["delta"], relation, spent["unit"], "run")
        ledger.spend(plain, record.workdir.name)
    delta = math.fsum(record.total["delta"] for record in group)
    words = f"**Total over {len(group)} runs on the same data**: "
    if delta >= 1:
        words += f"none, since their δ add up to {delta:.3g}"
    else:
        spent = ledger.guarantee(delta).to_json()
        words += _in_words(spent | {"mechanism": "the runs' totals added up"})
    if group[0].private["synthetic"]:
        words += " (synthetic data: what it would be on private ones)"
    return (
        f"{words}. This is what whoever sees all of them, or chooses among them, has to count. Runs that did "
        "not finish and runs in other folders are not in it."
    )


def _section(group: list[Record], title: str) -> str:
    releases, total = group[0].releases, group[0].total
    table = _table(group, releases)
    lines = [f"## {title}", "", *table, ""]
    if len(group) > 1:
        lines += [f"Mean ± standard error over {len(group)} seeds.", ""]
    seen = set()
    for label, spent in releases.items():
        words = _in_words(spent)
        if words not in seen:
            lines.append(f"- {label}: {words}")
        seen.add(words)
    if len(releases) > 1:
        lines.append(f"- **total of all releases**: {_in_words(total)}")
    for assumption in total["assumptions"]:
        lines.append(f"- assuming that {assumption}")
    if not_covered := group[0].private["not_covered"]:
        lines.append(f"- not covered by any guarantee: {'; '.join(not_covered)}")
    if group[0].notes:
        lines += ["", group[0].notes]
    return "\n".join(lines)


def _in_words(spent: dict) -> str:
    relation = spent["neighboring"].replace("_", " ")
    cost = f"ε = {_epsilon(spent)}, δ = {spent['delta']:.3g}"
    return f"{cost}, {relation} {spent['unit']}; {spent['mechanism']}"


def _epsilon(spent: dict) -> str:
    return "∞" if spent["epsilon"] is None else f"{spent['epsilon']:.4g}"


def _table(group: list[Record], releases: dict) -> list[str]:
    """Rows and columns from metric names `row/column`, with the ε of each row that was released."""
    cells = defaultdict(dict)
    for name in group[0].metrics:
        row, _, column = name.rpartition("/")
        values = [record.metrics[name] for record in group if name in record.metrics]
        cells[row or "all"][column] = _number(values)
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = [f"| | ε | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for row, values in cells.items():
        spent = releases.get(row)
        epsilon = "" if spent is None else _epsilon(spent)
        lines.append(f"| {row} | {epsilon} | {' | '.join(values.get(c, '') for c in columns)} |")
    return lines


def _number(values: list[float]) -> str:
    text = f"{np.mean(values):.4g}"
    if len(values) > 1:
        text += f" ± {_standard_error(values):.2g}"
    return text


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def _write_csv(found: list[Record], path: Path) -> None:
    rows = [
        {
            "config": record.source,
            **record.overrides,
            **record.metrics,
            **{f"privacy/{name}": value for name, value in record.privacy.items()},
            "wall_seconds": record.wall_seconds,
        }
        for record in found
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "wall_seconds"))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*columns, "wall_seconds"])
    writer.writeheader()
    writer.writerows(rows)
    storage.write_text(path, text.getvalue())


# ---------------------------------------------------------------------------------------------
# Figures


def draw(found: list[Record], folder: Path) -> list[Path]:
    """Draws what the runs at hand allow; nothing where matplotlib is not installed."""
    if not plotting.available():
        return []
    paths = [*_draw_training(found, folder), *_draw_sweeps(found, folder)]
    for module, group in _by_experiment(found).items():
        if hasattr(module, "figures"):
            paths += module.figures(group, folder)
    return paths


def _by_experiment(found: list[Record]) -> dict:
    groups = defaultdict(list)
    for record in found:
        groups[records.experiment(ml_collections.ConfigDict(record.config))].append(record)
    return groups


def _draw_training(found: list[Record], folder: Path) -> list[Path]:
    """Loss and ε against steps, for each training run that kept a log."""
    curves = defaultdict(list)
    for record in found:
        log = record.workdir / "metrics.jsonl"
        for entry in storage.read_lines(log) if log.exists() else ():
            if {"run", "step", "loss"} <= entry.keys():
                name = " ".join([entry["run"], *(f"{k}={v}" for k, v in record.overrides.items())])
                curves[name].append((entry["step"], entry["loss"], entry["epsilon"]))
    if not curves:
        return []
    figure, axis = plotting.pyplot().subplots(figsize=(6.4, 4))
    right = axis.twinx()
    for name, points in curves.items():
        steps, losses, epsilons = zip(*points, strict=True)
        (line,) = axis.plot(steps, losses, label=name)
        if None not in epsilons:
            right.plot(steps, epsilons, linestyle=":", color=line.get_color())
    axis.set(xlabel="step", ylabel="training loss")
    right.set_ylabel("ε spent (dotted)")
    right.set_ylim(bottom=0)
    if len(curves) <= 12:
        axis.legend(fontsize=8)
    return [plotting.save(figure, folder / "training.png")]


def _draw_sweeps(found: list[Record], folder: Path) -> list[Path]:
    """Each metric against each swept number, a line per row of the table.

    Error bars are standard errors: over the runs at a point, or, of a single run, what it says itself.
    """
    paths = []
    values = defaultdict(set)
    for record in found:
        for name, value in records.flatten(record.config).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values[name].add(value)
    swept = [n for n, seen in values.items() if len(seen) > 1 and n not in ("seed", "noise_seed")]
    columns = dict.fromkeys(name.rpartition("/")[2] for record in found for name in record.metrics)
    columns = [column for column in columns if not column.endswith("_se")]
    for name in swept:
        for column in columns:
            points = defaultdict(lambda: defaultdict(list))
            for record in found:
                x = records.flatten(record.config).get(name)
                for metric, value in record.metrics.items():
                    row, _, found_column = metric.rpartition("/")
                    if found_column == column and isinstance(x, int | float):
                        own_error = record.metrics.get(f"{metric}_se", 0.0)
                        points[row][x].append((value, own_error))
            figure, axis = plotting.pyplot().subplots(figsize=(6.4, 4))
            for row, by_x in points.items():
                xs = sorted(by_x)
                means, errors = zip(*(_mean_and_error(by_x[x]) for x in xs), strict=True)
                axis.errorbar(xs, means, yerr=errors, marker="o", capsize=3, label=row or column)
            if min(values[name]) > 0 and max(values[name]) / min(values[name]) >= 10:
                axis.set_xscale("log")
            axis.set(xlabel="ε" if name == "epsilon" else name, ylabel=column)
            axis.legend(fontsize=8)
            file = f"{column}_against_{name}".replace("@", "_at_").replace("/", "_")
            paths.append(plotting.save(figure, folder / f"{file}.png"))
    return paths


def _mean_and_error(runs: list[tuple[float, float]]) -> tuple[float, float]:
    values, own_errors = zip(*runs, strict=True)
    if len(runs) == 1:
        return values[0], own_errors[0]
    return float(np.mean(values)), _standard_error(values)


def main(argv: list[str]) -> None:
    del argv
    try:
        workdir = flags.FLAGS.workdir
        if workdir is None:
            raise ValueError("--workdir is missing: use --workdir=DIR, a run's folder or a sweep's")
        print(write(Path(workdir)))
    except (ValueError, OSError) as error:
        cli.stop(error)


def start() -> None:
    """The command line."""
    flags.DEFINE_string("workdir", None, "a run's folder, or one that holds many")
    cli.start(main)
