"""Sums on meshes of eight devices: exact, with one reduction of the size of the gradient."""

import json

import pytest
from command_line import ROOT, paths, python
from mesh_cases import CASES
from xla_flags import on_devices

PROGRAM = ROOT / "tests/mesh_cases.py"
PARAMETERS = 3 * 3 * 3 * 32 + 96 * 32 + 32 * 64 + 64 + 64 * 32 + 2 * 32 * 64
EXAMPLE = 12 * 12 * 3 + 6 + 2  # an image, tokens, a key
SUMS = ["explicit, tensor parallel", *CASES["sums"]]


class Found(dict):
    """What `mesh_cases.py` prints of a case, from one process for all cases that share one."""

    def __missing__(self, case):
        (shared,) = [name for name, cases in CASES.items() if case in cases]
        done = python(PROGRAM, shared, timeout=600, PYTHONPATH=paths(), **on_devices(8))
        assert done.returncode == 0, done.stderr[-4000:]
        self.update(json.loads(done.stdout.splitlines()[-1]))
        return self[case]


@pytest.fixture(scope="module")
def found():
    return Found()


@pytest.mark.quick_cases("explicit, tensor parallel")
@pytest.mark.parametrize("case", SUMS)
def test_sums_are_those_of_one_device_and_of_per_example_gradients(found, case):
    case = found[case]
    assert max(case[k] for k in ("error", "from one device", "losses from one device")) < 1e-5
    assert case["norms"] < 1e-4
    # The one that is not finite, and the one that is masked.
    assert case["left out"] == [float("inf"), 0]
    assert case["laid out"]


@pytest.mark.quick_cases("explicit, tensor parallel")
@pytest.mark.parametrize("case", [case for case in SUMS if "FSDP" not in case])
def test_devices_exchange_nothing_but_the_sum(found, case):
    exchanged = found[case]["exchanged"]
    assert set(exchanged) == {"all-reduce"}
    size = sum(exchanged["all-reduce"])
    if case in ("explicit, data", "shard_map, data"):
        assert size == PARAMETERS
    elif case == "explicit, data, some trained":  # none for what is frozen
        assert size == 3 * 3 * 3 * 32 + 32 * 64
    elif case in ("automatic, data", "automatic, microbatches"):
        ordinary = sum(found["ordinary"]["all-reduce"])
        assert ordinary >= PARAMETERS
        assert size <= ordinary + EXAMPLE + 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_noise_is_drawn_where_it_is_added_and_the_same_on_any_number_of_devices(found, kind):
    case = found[f"{kind} noise"]
    assert case["equal"]
    assert case["laid out"]
    assert case["noise"] == pytest.approx(0.5 * 1.3, rel=0.05)
    assert sum(case["exchanged"].get("all-reduce", [])) <= 16
    assert set(case["exchanged"]) <= {"all-reduce"}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["pmap", "closed over"])
def test_what_devices_have_of_their_own_is_clipped_there(found, case):
    assert found[case]["error"] < 1e-5


@pytest.mark.slow
def test_kernels_of_examples_own_are_convolved_rightly_where_the_batch_is_sharded(found):
    assert max(found["own kernels"].values()) < 1e-4


@pytest.mark.slow
def test_gradients_of_kernels_in_branches_and_loops_are_right_where_the_batch_is_sharded(found):
    assert max(found["convolutions within"].values()) < 1e-4


def test_a_part_of_a_table_is_looked_up_on_explicit_axes(found):
    assert max(found["a part of a table"].values()) < 1e-5


def test_values_that_differ_between_devices_are_not_released_with_one_noise(found):
    assert "add them up first" in found["unsummed"]
