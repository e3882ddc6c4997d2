"""The clipping engine on models that others wrote, and on constructs of every framework.

    pip install -r experiments/bench/models_requirements.txt   # in an environment of its own
    python -m experiments.bench.models --workdir=runs/bench_models
    python -m experiments.bench.models --workdir=runs/bench_models --only='tunix|LSTM' --repeats=15
    MALLOC_MMAP_THRESHOLD_=1000000000 python -m experiments.bench.models --workdir=runs/models_128 --copies=8

Every case is the loss of one example, written as its package wants it. `dpx.clipped_grad` is compared with
`vmap(grad)`, whose gradients are added up in float64: sums must agree to 1e-5 (5e-3 in bfloat16),
and no norm may be too small. Then the ordinary step (mean gradient, not private) and `clipped_grad` are
called in turn, and its method "vmap" once. The table has, all over the ordinary step, the median of the
ratios of CPU time (T), that of CPU time for tracing and compilation in turn (C), and the ratio of XLA's
temporary bytes (M); and the share of parameter elements without a rule, whose per-example gradients are
held, with the primitives that cause it.

What does not run is a row too, with the exception in one line. Programs of a few milliseconds exaggerate T,
and those with a few KiB of temporary memory M; --copies takes every batch several times. Writes models.csv
and models.md; a case that is in the CSV already is not measured again, unless --only names it.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from dpx.runs import cli
from experiments.bench import _tables
from experiments.bench.models import (
    attention,
    constructs,
    convolutions,
    hugging_face,
    language,
    layers,
    loops,
    remat,
    science,
    vision,
    weights,
)
from experiments.bench.models.measure import Case, measure

THIRD_PARTY: dict[str, Callable[[], Case]] = (
    hugging_face.CASES | language.CASES | vision.CASES | science.CASES
)
CONSTRUCTS: dict[str, Callable[[], Case]] = (
    layers.CASES
    | attention.CASES
    | convolutions.CASES
    | loops.CASES
    | remat.CASES
    | weights.CASES
    | constructs.CASES
)
INSTALL = "pip install -r experiments/bench/models_requirements.txt"

_WORKDIR = flags.DEFINE_string("workdir", None, "Where the tables go.", required=True)
_ONLY = flags.DEFINE_string("only", None, "Regular expression of the cases to measure (again).")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed turns of every program.", lower_bound=1)
_COMPILATIONS = flags.DEFINE_integer(
    "compilations", 3, "Compilations of both steps.", lower_bound=1
)
_COPIES = flags.DEFINE_integer("copies", 1, "How often each batch is taken.", lower_bound=1)


def row(name: str, build: Callable[[], Case], *settings: int) -> dict[str, Any]:
    """The case measured, with the `settings` of `measure`, or why it was not."""
    found: dict[str, Any] = {"case": name, "third_party": int(name in THIRD_PARTY)}
    try:
        return found | {"status": "ran"} | measure(build(), *settings)
    except ModuleNotFoundError as error:
        return found | {"status": f"not installed ({error.name}): {INSTALL}"}
    except Exception as error:  # Whatever others' code raises is a result.
        text = " ".join(str(error).split())[:240]
        return found | {"status": f"{type(error).__name__}: {text}"}
    finally:
        jax.clear_caches()


def line(row: dict[str, Any]) -> dict[str, str]:
    """The cells of a case that ran; the row may come from the file."""
    value = {key: float(row[key]) for key in row if key not in ("case", "status", "primitives")}
    share = f"{100 * value['no_rule']:.2g} % {row['primitives']}"
    return {
        "case": row["case"],
        "sum error": f"{value['error']:.1e}",
        "norm excess": f"{value['norm_excess']:.1e}",
        "ordinary step": f"{value['ms']:.3g} ms",
        "T / C / M": f"{value['time']:.2f} / {value['compile']:.1f} / {value['memory']:.2f}",
        "vmap: T / M": f"{value['vmap_time']:.2f} / {value['vmap_memory']:.2f}",
        "no rule": share if value["no_rule"] else "none",
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in markdown: what ran, then what did not."""
    ran = [line(row) for row in rows if row["status"] == "ran"]
    failed = [
        {"does not run": row["case"], "why": row["status"].replace("|", "\\|")}
        for row in rows
        if row["status"] != "ran"
    ]
    return "\n".join(_tables.markdown(lines) for lines in (ran, failed) if lines)


def main(argv: list[str]) -> None:
    del argv
    cases = THIRD_PARTY | CONSTRUCTS
    try:
        wanted = [n for n in cases if _ONLY.value is None or re.search(_ONLY.value, n)]
    except re.error as error:
        cli.stop(ValueError(f"--only={_ONLY.value} must be a regular expression: {error}"))
    if not wanted:
        cli.stop(
            ValueError(f"--only={_ONLY.value} must match a case: see models.md, or leave it out")
        )
    workdir = Path(_WORKDIR.value)
    settings = _REPEATS.value, _COMPILATIONS.value, _COPIES.value
    rows = {row["case"]: row for row in _tables.read(workdir / "models.csv")}
    for name in wanted:
        if _ONLY.value is None and name in rows:
            continue
        rows[name] = row(name, cases[name], *settings)
        print(name, rows[name]["status"], rows[name].get("time", ""), flush=True)
        write(workdir, [rows[name] for name in cases if name in rows])
    write(workdir, [rows[name] for name in cases if name in rows])


def write(workdir: Path, rows: list[dict[str, Any]]) -> None:
    """Both tables, so that a run that is ended leaves what it has."""
    parts = [("Models of other packages", "1"), ("Constructs", "0")]
    text = "\n".join(
        f"## {title}\n\n{table([r for r in rows if str(r['third_party']) == flag])}"
        for title, flag in parts
    )
    _tables.write(workdir / "models.csv", rows, text)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
