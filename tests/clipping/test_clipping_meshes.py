"""Sums on meshes of eight devices: exact, with one reduction of the size of the gradient."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mesh_cases import OTHER_CASES, QUICK_CASES
from xla_flags import on_devices

PROGRAM = Path(__file__).parents[1] / "mesh_cases.py"
PARAMETERS = 3 * 3 * 3 * 32 + 96 * 32 + 32 * 64 + 64 + 64 * 32 + 2 * 32 * 64
EXAMPLE = 12 * 12 * 3 + 6 + 2  # an image, tokens, a key


class Found(dict):
    """What `mesh_cases.py` prints of a case: one process for many cases, because starting takes the time."""

    def __missing__(self, case):
        self.update(run("quick" if case in QUICK_CASES else "other"))
        return self[case]


def run(cases):
    done = subprocess.run(
        [sys.executable, PROGRAM, cases],
        env=os.environ | on_devices(8) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return Found()


def cases(*names):
    """Parameters, of which those are slow whose case is not a quick one."""
    slow = pytest.mark.slow
    return [pytest.param(x, marks=[] if x in QUICK_CASES else slow, id=x) for x in names]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(*(x for x in {**QUICK_CASES, **OTHER_CASES} if ", " in x)))
def test_sums_are_those_of_one_device_and_of_per_example_gradients(found, case):
    check(found[case])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data", "tensor parallel"])
def test_sums_of_some_parameters_on_explicit_axes(found, layout):
    exchanged = found[f"explicit, {layout}, some trained"]["exchanged"]
    assert set(exchanged) == {"all-reduce"}
    if layout == "data":  # none for what is frozen
        assert sum(exchanged["all-reduce"]) == 3 * 3 * 3 * 32 + 32 * 64


def check(case):
    assert case["error"] < 1e-5
    assert case["from one device"] < 1e-5
    assert case["losses from one device"] < 1e-5
    assert case["norms"] < 1e-4
    assert case["left out"] == [
        float("inf"),
        0,
    ]  # the one that is not finite, the one that is masked
    assert case["laid out"]


@pytest.mark.slow
def test_sums_under_pmap(found):
    assert found["pmap"]["error"] < 1e-5


@pytest.mark.parametrize("case", cases("explicit, data", "shard_map, data"))
def test_devices_exchange_nothing_but_the_sum(found, case):
    exchanged = found[case]["exchanged"]
    assert list(exchanged) == ["all-reduce"]
    assert sum(exchanged["all-reduce"]) == PARAMETERS


@pytest.mark.parametrize("case", cases("automatic, data", "automatic, microbatches"))
def test_on_automatic_axes_devices_exchange_what_training_does_and_one_example(found, case):
    exchanged = found[case]["exchanged"]
    assert set(exchanged) == {"all-reduce"}
    ordinary = sum(found["ordinary"]["all-reduce"])
    assert ordinary >= PARAMETERS
    assert sum(exchanged["all-reduce"]) <= ordinary + EXAMPLE + 16


@pytest.mark.parametrize(
    "case", cases(*(f"{kind}, tensor parallel" for kind in ("automatic", "explicit", "shard_map")))
)
def test_tensor_parallel_sums_gather_nothing(found, case):
    assert set(found[case]["exchanged"]) == {"all-reduce"}


@pytest.mark.parametrize("name", cases("automatic noise", "explicit noise"))
def test_noise_is_drawn_where_it_is_added_and_the_same_on_any_number_of_devices(found, name):
    case = found[name]
    assert case["equal"]
    assert case["laid out"]
    assert case["noise"] == pytest.approx(0.5 * 1.3, rel=0.05)
    assert sum(case["exchanged"].get("all-reduce", [])) <= 16
    assert set(case["exchanged"]) <= {"all-reduce"}


def test_what_a_loss_closes_over_may_differ_between_devices(found):
    assert found["closed over"]["error"] < 1e-5


def test_kernels_of_examples_own_are_convolved_rightly_where_the_batch_is_sharded(found):
    assert max(found["own kernels"].values()) < 1e-4


def test_gradients_of_kernels_in_branches_and_loops_are_right_where_the_batch_is_sharded(found):
    assert max(found["convolutions within"].values()) < 1e-4


def test_values_that_differ_between_devices_are_not_released_with_one_noise(found):
    assert "add them up first" in found["unsummed"]
