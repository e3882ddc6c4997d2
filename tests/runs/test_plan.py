"""`dpx plan`: the table has the plan among its neighbours, and the figure is drawn."""

import pytest
from command_line import call

from dpx.runs.plan import beside, table
from dpx.training import plan

BUDGET = {"epsilon": 3.0, "delta": 1e-4}


@pytest.mark.slow
def test_plans_beside_it_have_other_batches_and_as_many_epochs():
    chosen = plan(64, **BUDGET, batch_size=8, steps=16)
    found = list(beside(chosen))
    assert [each.batch_size for each in found] == [64, 32, 8, 2]
    assert {each.epochs for each in found} == {2}
    noises = [each.training_noise for each in found]
    assert noises == sorted(noises)
    lines = table(found, chosen).splitlines()
    assert [line.startswith("->") for line in lines] == [False, False, False, True, False]
    assert lines[3].split()[1:6] == ["8", "16", chosen.sampling.name, f"{chosen.noise_multiplier:.4g}",
                                     f"{chosen.step_noise:.3g}"]  # fmt: skip
    assert "1.00 of the least" in lines[1]


def test_a_plan_of_whole_batches_stands_beside_smaller_ones():
    chosen = plan(8, **BUDGET, batch_size=8, steps=2)
    assert [each.batch_size for each in beside(chosen)] == [8, 2]


@pytest.mark.slow
def test_the_command_prints_a_table_and_draws(tmp_path):
    ended = call("plan", "--records=64", "--epsilon=3", "--epochs=2", f"--workdir={tmp_path}")
    assert ended.returncode == 0, ended.stderr
    assert "64 records, ε = 3, δ = 0.0015625" in ended.stdout
    assert "loss, params, data, epsilon=3, delta=0.0015625, epochs=2" in ended.stdout
    assert ended.stdout.count("->") == 1
    assert (tmp_path / "plan.png").stat().st_size > 1000
