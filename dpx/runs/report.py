"""Tables and figures of the finished runs in a folder.

dpx report --workdir=DIR       writes report.md, results.csv and *.png
"""

import csv
import io
import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from absl import flags
from dp_accounting import NeighboringRelation

import dpx
from dpx import _storage as storage
from dpx.runs import cli, comparison, figures, records, tables
from dpx.runs.records import Record


def summarize(record: Record) -> str:
    """A run as markdown: its table, its cost, and its notes."""
    return _section([record], record.title())


def write(folder: Path) -> str:
    """Writes report.md, results.csv and figures for all finished runs in a folder.

    Returns:
      The report.

    Raises:
      ValueError: if the folder holds no finished run.
    """
    if not records.finished(folder):
        raise ValueError(f"{folder} holds no finished run")
    with storage.lock(folder, wait=60):
        # Read under the lock, so that the last of several sweeps in one folder has read all runs.
        runs = records.read_all(folder)
        groups = records.by_seed(runs)
        shared = _shared([*groups.values()]) if len(groups) > 1 else []
        sections = tables.overview(groups) + [
            _section(group, title, shared) for title, group in groups.items()
        ]
        if shared:
            sections.append("\n".join([f"## In all {len(groups)} of them", "", *shared]))
        _write_csv(runs, folder / "results.csv")
        pictures = [f"![{path.stem}]({path.name})" for path in figures.draw(runs, folder)]
        text = "\n\n".join([*sections, *totals(runs), *pictures]) + "\n"
        storage.write_text(folder / "report.md", text)
    return text


def totals(runs: Iterable[Record]) -> list[str]:
    """The total cost, as markdown, of the runs on each data set that several runs have used.

    The ε and δ of these runs are added up. That guarantee holds against somebody who sees all runs, and is
    not the tightest possible. Only costs of one unit and one neighbouring relation can be added; if there are
    others, the report says so.
    """
    groups, kinds = defaultdict(list), defaultdict(list)
    for record in runs:
        total = record.total
        kind = total["neighboring"].replace("_", " ") + " " + total["unit"]
        groups[_data_set(record), kind].append(record)
    for data_set, kind in groups:
        kinds[data_set].append(kind)
    added_up = [_together(group) for group in groups.values() if len(group) > 1]
    return added_up + [_apart(units) for units in kinds.values() if len(units) > 1]


def _data_set(record: Record) -> tuple:
    """The identity of a run's data set: the file that it reads, or else the kind of data.

    Runs that read different parts of a file, or read it differently, have the same people. Runs that name
    neither a file nor a kind count as runs on one data set, and so do synthetic data with the same settings
    and seed.
    """
    data = record.config.get("data", {})
    if record.private["synthetic"]:
        settings = json.dumps(data, sort_keys=True)
        return settings, record.config["seed"], record.config["experiment"]
    path = data.get("path")
    if path is None:
        return "kind", data.get("kind")
    return "path", os.path.realpath(os.path.join(record.folder, str(path)))


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
        words += in_words(spent | {"mechanism": "the runs' totals added up"})
    if group[0].private["synthetic"]:
        words += " (synthetic data: what it would be on private ones)"
    return (
        f"{words}. This is what whoever sees all of them, or chooses among them, has to count. Runs that did "
        "not finish and runs in other folders are not in it."
    )


def _apart(kinds: list[str]) -> str:
    return (
        f"**Runs on the same data that cannot be added up**: their guarantees are to {', to '.join(kinds)}. "
        "Whoever sees all of them has seen more than any of these totals counts."
    )


def _section(group: list[Record], title: str, elsewhere: Collection[str] = ()) -> str:
    """The table of a group of runs and its cost, without sentences that stand `elsewhere`."""
    measures = tables.averaged(group)
    lines = [f"## {title}", "", *tables.table(group[0], measures), ""]
    if len(group) > 1:
        lines += [f"Mean ± standard error over {len(group)} seeds.", ""]
    for by in group[0].comparisons:
        for words in comparison.remarks(by, measures, group[0].headline_row, group[0].titles):
            lines += [f"**{words}**", ""]
    lines += [line for line in _about(group[0]) if line not in elsewhere]
    return "\n".join(lines).rstrip()


def _about(record: Record) -> list[str]:
    """The cost of a run, its assumptions, and its notes."""
    releases, total = record.releases, record.total
    lines, seen = [], set()
    for label, spent in releases.items():
        words = in_words(spent)
        if words not in seen:
            lines.append(f"- {label}: {words}")
        seen.add(words)
    if len(releases) > 1:
        lines.append(f"- **total of all releases**: {in_words(total)}")
        asked = record.config["epsilon"]
        if (math.inf if total["epsilon"] is None else total["epsilon"]) > asked:
            lines.append(
                f"- The config's ε = {asked:g} is what a row may cost on its own; whoever sees all rows has "
                "to count the total."
            )
    if record.risk:
        lines.append(f"- {risk_in_words(record)}")
    lines += [f"- assuming that {assumption}" for assumption in total["assumptions"]]
    if not_covered := record.private["not_covered"]:
        lines.append(f"- not covered by any guarantee: {'; '.join(not_covered)}")
    return lines + ([f"\n{record.notes}"] if record.notes else [])  # no part of the list above


def _shared(groups: Sequence[list[Record]]) -> list[str]:
    """The sentences that all groups have in common, which the report states once."""
    first, *others = [_about(group[0]) for group in groups]
    return [line for line in first if all(line in lines for lines in others)]


def in_words(spent: dict) -> str:
    relation = spent["neighboring"].replace("_", " ")
    cost = f"ε = {tables.epsilon_of(spent)}, δ = {spent['delta']:.3g}"
    return f"{cost}, {relation} {spent['unit']}; {spent['mechanism']}"


def risk_in_words(record: Record) -> str:
    """The risk of the headline release, as a bound on any attack, in words."""
    rates = []
    for relation, risk in record.risk.items():
        mu = "∞" if risk["mu"] is None else f"{risk['mu']:.3g}"
        share = f"{risk['tpr_at_1_percent']:.3g}"
        rates.append(f"at most {share} (μ = {mu}) to {relation.replace('_', ' ')}")
    return (
        f"risk of {record.headline_row or 'the result'}, as the true-positive rate of any attack at 1 % "
        f"false positives: {', '.join(rates)} {record.privacy['unit']}"
    )


def _write_csv(runs: list[Record], path: Path) -> None:
    rows = [
        {
            "config": record.source,
            **record.overrides,
            **record.metrics,
            **{f"privacy/{name}": value for name, value in record.privacy.items()},
            "wall_seconds": record.wall_seconds,
        }
        for record in runs
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "wall_seconds"))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*columns, "wall_seconds"])
    writer.writeheader()
    writer.writerows(rows)
    storage.write_text(path, text.getvalue())


@cli.OneLine(ValueError)
def main() -> None:
    print(write(cli.workdir("DIR, a run's folder or a sweep's")))


def start() -> None:
    """The command line."""
    flags.DEFINE_string("workdir", None, "a run's folder, or one that holds many")
    cli.start(main)
