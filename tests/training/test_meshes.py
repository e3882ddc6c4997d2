"""Private training on meshes: the same result on any of them, from one reduction of the sum."""

import json

import jax
import numpy as np
import pytest
from command_line import ROOT, paths, python
from fit_cases import OTHERS, SEEN
from xla_flags import CHEAP, on_devices

from dpx.training.layout import Layout, as_mesh

CASES = ROOT / "tests/fit_cases.py"
PARAMETERS = 48 * 16 + 16 * 16 + 48 + 3


@pytest.fixture(scope="module")
def found():
    """What `fit_cases.py` prints: one process for all cases, because starting takes the time."""
    done = python(CASES, timeout=600, PYTHONPATH=paths(), **on_devices(8, CHEAP))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["resumed", *SEEN, *OTHERS])
def test_training_is_that_on_one_device(found, case):
    if case == "banded":
        pytest.importorskip("jax_privacy")
    narrow = "bfloat16" in case
    # Narrow products of other shapes are rounded otherwise, by 2**-9 of a gradient at most.
    assert found[case]["apart"] < (1e-3 if narrow else 1e-6) < 0.01 < found["moved"]
    assert narrow or found[case]["losses apart"] < 1e-6
    assert not narrow or 1e-5 < found[case]["from float32"] < 1e-2
    assert found[case]["same guarantee"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["data 2", "data 8", "cut, data 8"])
def test_devices_exchange_nothing_but_the_sum_once_a_step(found, case):
    exchanged = found[case]["exchanged"]
    assert list(exchanged) == ["all-reduce"]
    # With the loss, and how many records it is the mean of.
    assert sum(exchanged["all-reduce"]) == PARAMETERS + 2


@pytest.mark.slow
def test_devices_share_parameters_and_state(found):
    assert found["data 8"]["shares"] == [1] * 6
    assert found["data 4, model 2"]["shares"] == found["model 2"]["shares"] == [2] * 6


@pytest.mark.slow
def test_noise_is_the_same_to_the_last_bit(found):
    assert found["noise apart"] == found["secure noise apart"] == 0
    assert found["noise of the stream"] > 0.01
    assert found["noise"] > 0.01


def test_each_block_takes_its_own_members_of_the_sample():
    layout = Layout(None, 11)
    layout.shards, bounds = 4, np.array([0, 2, 5, 8, 11])
    layout._first, layout._last = bounds[:-1], bounds[1:]
    chosen = np.array([0, 1, 2, 4, 10])
    places, mask, pieces = layout.batch(chosen, 1, 3)
    assert pieces == 2
    assert mask.reshape(4, 3).sum(1).tolist() == [2, 2, 0, 1]
    names = places.reshape(4, 3) + bounds[:-1, None]
    assert names.reshape(-1)[mask].tolist() == chosen.tolist()
    assert layout.batch(chosen[:0], 2, 3)[2] == 1  # an empty sample is a step as well
    assert layout.batch(chosen, 1, 1)[0].size == 8  # what exceeds the room is not cut off


@pytest.mark.parametrize(
    ("mesh", "named"),
    [
        ({"data": 64}, r"mesh={'data': 64} must have at most \d+ device.* use smaller axes"),
        ({"data": 0}, r"mesh\['data'\]=0 must"),
        ({"batch": 2}, "mesh={'batch': 2} must have the axes 'data' and 'model'"),
        ({}, "mesh={} must have the axes"),
        (4, "mesh=4 must have the axes"),
    ],
)
def test_meshes_that_cannot_be(mesh, named):
    with pytest.raises(ValueError, match=named):
        as_mesh(mesh)


def test_a_mesh_without_one_of_the_axes_has_it_with_one_device():
    mesh = as_mesh(jax.make_mesh((1,), ("model",)))
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
