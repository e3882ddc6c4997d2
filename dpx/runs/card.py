"""The card of an exported model: its guarantee, the assumptions of that, and the measured metrics."""

import json
from typing import NamedTuple

import dpx
from dpx.runs import report, tables
from dpx.runs.records import Record


class Model(NamedTuple):
    """The model in an exported folder.

    Attributes:
      base: The name of the model that was tuned.
      library: The library that opens it: "peft" for adapters, "transformers" or "gguf" for a whole model.
    """

    base: str
    library: str


def text(record: Record, model: Model, *, metrics: bool = True) -> str:
    """The card as markdown, with the metadata of Hugging Face at its beginning.

    It holds the content of `privacy.json`, and from `result.json` the table of the private model and its
    baselines. It holds nothing of the config, since names of files and columns may be private.

    Args:
      record: The finished run that left the model.
      model: The model beside the card.
      metrics: Whether the table is included; its numbers are computed on held-out records without noise.
    """
    parts = [_metadata(model), _guarantee(record, model), _rest(record)]
    parts += [_metrics(record)] if metrics else []
    made = f"Made by dpx {dpx.__version__}, whose `SECURITY.md` says how such claims are checked.\n"
    return "\n".join([*parts, made])


def _metadata(model: Model) -> str:
    adapters = model.library == "peft"
    lines = {
        "library_name": model.library,
        "base_model": json.dumps(model.base, ensure_ascii=False),
        "base_model_relation": "adapter" if adapters else "finetune",
        "pipeline_tag": "text-generation",
        "tags": "[differential-privacy, dpx" + (", lora]" if adapters else "]"),
    }
    return "\n".join(["---", *(f"{name}: {value}" for name, value in lines.items()), "---", ""])


def _guarantee(record: Record, model: Model) -> str:
    spent, unit = record.releases.get(record.headline_row, record.total), record.privacy["unit"]
    kind = "synthetic" if record.private["synthetic"] else "private"
    what = "Adapters for" if model.library == "peft" else "A copy of"
    rows = {
        "ε": tables.epsilon_of(spent),
        "δ": f"{spent['delta']:.3g}",
        "unit of privacy": unit,
        "neighbouring relation": f"{spent['neighboring'].replace('_', ' ')} {unit}",
        "mechanism": spent["mechanism"],
    }
    return "\n".join(
        [
            f"# {model.base}, tuned with differential privacy",
            "",
            f"{what} {model.base}, tuned on {kind} records. What the weights reveal of any one {unit} is "
            "bounded by this guarantee:",
            "",
            *tables.markdown(["", "value"], [{"": k, "value": v} for k, v in rows.items()]),
            "",
            *([f"The {report.risk_in_words(record)}.", ""] if record.risk else []),
        ]
    )


def _rest(record: Record) -> str:
    total = record.total
    lines = ["## What the run released", ""]
    lines += [f"- {label}: {report.in_words(spent)}" for label, spent in record.releases.items()]
    lines += [f"- **total of all releases**: {report.in_words(total)}", ""]
    lines += [
        "Whoever sees other releases of this run, or other runs on the same records, adds them up.",
        "",
    ]
    lines += ["## What the guarantee assumes", "", *(f"- {x}" for x in total["assumptions"]), ""]
    lines += ["## What no guarantee covers", "", *(f"- {x}" for x in record.private["not_covered"])]
    return "\n".join([*lines, ""])


def _metrics(record: Record) -> str:
    """The table of the private rows and their baselines, with the metrics that all of these have.

    Other rows are not private, and other metrics compare with such rows.
    """
    shown = {record.headline_row, *record.releases}
    for by in record.comparisons:
        shown |= {*by.baselines, *by.starts.values()}
    own = [measure for measure in record.measures if measure.row in shown]
    rows, names = {m.row for m in own}, {m.metric for m in own}
    common = {n for n in names if {m.row for m in own if m.metric == n} == rows}
    return "\n".join(
        [
            "## Metrics",
            "",
            "Computed on held-out records without noise: no guarantee covers these numbers.",
            "",
            *tables.table(record, [m for m in own if m.metric in common]),
            "",
        ]
    )
