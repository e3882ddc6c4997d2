"""The benchmark on other people's models: what it compares, and that nothing is left out in silence."""

import jax
import jax.numpy as jnp
import pytest

from experiments.bench.models import __main__ as bench
from experiments.bench.models import remat
from experiments.bench.models.building import normal, plain, weights
from experiments.bench.models.measure import Case, errors, measure


def small(**options):
    """Two layers, one of them used by a scan."""

    def apply(p, x):
        return jax.lax.map(lambda row: jnp.tanh(row @ p["w"]), x) @ p["v"]

    return plain(apply, weights(w=(4, 4), v=(4, 2)), normal(3, 4, batch=4), **options)


def test_there_are_as_many_cases_as_promised():
    assert len(bench.THIRD_PARTY) >= 25
    assert len(bench.CONSTRUCTS) >= 60
    assert not set(bench.THIRD_PARTY) & set(bench.CONSTRUCTS)


@pytest.mark.slow
def test_a_case_is_compared_and_measured():
    found = bench.row("small", lambda: small(microbatch_size=1), 1)
    assert found["status"] == "ran"
    assert found["error"] < 1e-6
    assert 0 <= found["norm_excess"] < 1e-3
    assert found["no_rule"] == 0
    assert "\n| small | " in bench.table([found])


@pytest.mark.slow
def test_a_wrong_sum_is_a_row_of_its_own(monkeypatch):
    monkeypatch.setattr("experiments.bench.models.measure.TOLERANCE", -1.0)
    assert bench.row("small", small, 1)["status"].startswith("ArithmeticError: the sum differs")


@pytest.mark.slow
@pytest.mark.parametrize("name", remat.MODELS)
def test_a_llama_is_clipped_by_its_method(name):
    case = remat.MODELS[name](remat.Size(32, 2, 1, 16))
    assert case.method == ("two_pass" if "two passes" in name else "auto")
    assert measure(case, 1)["error"] < 1e-6


def test_errors_are_those_of_the_clipped_sum():
    gradients = [jnp.array([[3.0, 4.0], [0.3, 0.4]])]  # Of norms 5 and 0.5, clipped to 1.
    right = jnp.array([0.6 + 0.3, 0.8 + 0.4])
    error, least, most = errors(gradients, ([right], jnp.array([5.0, 0.5])), 1.0)
    assert error < 1e-7
    assert (least, most) == pytest.approx((0.0, 0.0), abs=1e-7)
    error, *_ = errors(gradients, ([right + 0.01], jnp.array([5.0, 0.5])), 1.0)
    assert error > 1e-3
    _, least, _ = errors(gradients, ([right], jnp.array([4.0, 0.5])), 1.0)
    assert least == pytest.approx(-0.2)


def test_what_does_not_run_says_why():
    def absent():
        import package_that_nobody_has  # noqa: F401  # pyright: ignore

    def broken():
        raise TypeError("first line\nand | second")

    rows = [bench.row("absent", absent, 1), bench.row("broken", broken, 1)]
    assert rows[0]["status"] == f"not installed (package_that_nobody_has): {bench.INSTALL}"
    assert rows[1]["status"] == "TypeError: first line and | second"
    assert "| broken | TypeError: first line and \\| second |" in bench.table(rows)


def test_a_loss_that_mixes_examples_is_refused():
    with pytest.raises(ValueError, match="BatchNorm in training mode"):
        measure(bench.CONSTRUCTS["linen BatchNorm in training"](), 1)


@pytest.mark.slow
def test_options_of_a_case_are_those_of_clipped_grad():
    case = Case(lambda p, x: jnp.sum(p["a"] * p["b"] * x), {"a": jnp.ones(3), "b": jnp.ones(3)},
                (jnp.ones((2, 3)),), {"wrt": {"a": True, "b": False}})  # fmt: skip
    assert measure(case, 1)["parameters"] == 3


@pytest.mark.slow
def test_a_batch_that_is_taken_several_times_holds_as_much_more():
    once, often = (measure(small(), 1, copies=copies) for copies in (1, 64))
    assert often["error"] < 1e-6
    assert often["temp_mib"] > 8 * once["temp_mib"]
