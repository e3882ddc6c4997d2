"""What `--dry_run` says that a run will cost is what the run then costs: every config and variant."""

import pytest
from all_configs import all_sources, configured

from dpx.launch import run
from dpx.training import keys
from experiments.dp_transformer import training


def labels(mechanism):
    """Of what a ledger composed, as it says in words."""
    return sorted(mechanism.partition(" (composed")[0].split(", "))


@pytest.mark.slow
@pytest.mark.parametrize("source", list(all_sources()))
def test_a_run_costs_what_its_plan_says(source, tmp_path, monkeypatch):
    # Nothing is trained, which takes time and changes no guarantee.
    monkeypatch.setattr(training, "train", lambda loss, params, *rest, **more: params)
    drawn, draw = [], keys._draw
    monkeypatch.setattr(keys, "_draw", lambda: (drawn.append(1), draw())[1])
    config = configured(source, tmp_path)
    run.prepare(config, source, tmp_path / "run")
    total = run.compose(dict(run.plan(config).releases))
    assert not drawn
    record = run.execute(config, tmp_path / "run")
    spent = record.total
    assert spent["epsilon"] == pytest.approx(total.epsilon, rel=1e-6)
    assert spent["delta"] == pytest.approx(total.delta, rel=1e-6)
    assert (spent["neighboring"], spent["unit"]) == (total.neighboring.name.lower(), total.unit)
    assert labels(spent["mechanism"]) == labels(total.mechanism)
    # Only what is about nobody's data may have noise that everybody can repeat.
    assert record.private["synthetic"] == (not drawn)
