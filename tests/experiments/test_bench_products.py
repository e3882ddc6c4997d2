"""What clipping multiplies on a GPU, by a model of cost that needs none, and the command that measures it."""

import pytest
from command_line import call

from experiments.bench import costs


@pytest.mark.quick_cases("recommender-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [
        "recommender",
        pytest.param("gpt2-small", marks=pytest.mark.slow),
        pytest.param("135M", marks=pytest.mark.slow),
    ],
)
def test_products_are_little_more_than_the_ordinary_gradients(shape, dtype):
    assert 1 <= costs.product_ratio(costs.SHAPES[shape], dtype) <= 1.25


@pytest.mark.slow
def test_the_table_of_an_accelerator_is_printed_on_a_cpu():
    done = call("bench.accelerator", "--tiny", "--repeats=1")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| gpt2", "| recomm"))]
    assert len(rows) == 18  # Of each model and type all steps, but the noise of one type alone.
