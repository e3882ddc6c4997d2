"""The figure of a language model: what every row reaches."""

from pathlib import Path

from dpx.runs import plotting


def draw(records, folder: Path, *, unit: str = "character") -> list[Path]:
    """The rows of the last run as bars, in nats per `unit`."""
    record = records[-1]
    bars = [measure for measure in record.measures if measure.metric == f"nats_per_{unit}"]
    if not bars:
        return []
    size = (7, 1.2 + 0.35 * len(bars))
    figure, axis = plotting.pyplot().subplots(figsize=size, layout="constrained")
    for place, measure in enumerate(reversed(bars)):
        private = measure.row in record.releases
        color = "C0" if measure.row == record.headline_row else "C2" if private else "0.6"
        axis.barh(place, measure.value, color=color)
        axis.text(measure.value, place, f" {measure.value:.3f}", va="center", fontsize=8)
    titles = [record.titles.get(measure.row, measure.row) for measure in reversed(bars)]
    axis.set_yticks(range(len(bars)), titles)
    axis.set_xlim(0, 1.12 * max(measure.value for measure in bars))
    axis.set_xlabel(f"nats per {unit} of held-out records (grey: not private)")
    return [plotting.save(figure, folder / "rows.png", record.title())]
