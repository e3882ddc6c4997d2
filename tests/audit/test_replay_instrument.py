"""Replaying programs on neighbours: what the instrument measures, and every difference that it names."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

import dpx
from dpx import _watch, audit, noise, privacy
from dpx.audit.comparison import compare
from dpx.audit.recordings import Seen
from dpx.privacy import gaussian_epsilon

KEY = jax.random.key(3)


def released(x, *, sensitivity=1.0, label="sum", key=KEY, multiplier=2.0, axis=None):
    about = {"noise_multiplier": multiplier, "label": label, "axis": axis}
    return noise.release(key, x.sum(0), sensitivity=sensitivity, **about)


DATA = np.eye(4)
pytestmark = pytest.mark.usefixtures("recording")


@pytest.mark.parametrize("jitted", [False, True])
def test_the_ratio_is_the_distance_over_the_sensitivity(jitted):
    program = lambda x: (jax.jit(released) if jitted else released)(x, sensitivity=0.5)  # noqa: E731
    found = audit.replay(program, DATA, DATA[1:])
    assert [each.label for each in found.compared] == ["sum"]
    assert found.largest_ratio == pytest.approx(2.0)
    assert not found.differences  # the output of the second run is that of the first
    np.testing.assert_array_equal(found.recording.left["result"], np.asarray(program(DATA)))
    with pytest.raises(AssertionError, match="sum moved by 2 times"):
        found.check()


@pytest.mark.slow
def test_vmapped_and_scanned_releases_are_seen_one_by_one():
    def program(x):
        keys = jax.random.split(KEY, 3)
        first = jax.vmap(lambda key: released(x, key=key))(keys)
        _, more = jax.lax.scan(
            lambda carry, key: (carry, released(x, key=key)), 0, jax.random.split(keys[0], 2)
        )
        return first, more

    found = audit.replay(program, jnp.asarray(DATA), jnp.asarray(2 * DATA)).check(tolerance=1.1)
    assert len(found.compared) == 5


def from_a_sample(x, probability):
    """Releases gradients of a sample, which is not looked at."""
    next(dpx.poisson_batches(4, sampling_probability=probability, steps=1, seed=2))
    return released(x, label="gradients")


def whole_sample(**options):
    return dpx.poisson_batches(4, sampling_probability=1.0, steps=1, **options)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (lambda x: (released(x), x.sum()), "result/1 differs"),
        (lambda x: {"a": {"b": x.sum()}, "a/b": 0.0}, "result/a/b differs"),
        (lambda x: print(len(x)), "stdout differs"),
        (lambda x: print(len(x), file=sys.stderr), "stderr differs"),
        (lambda x: [released(x, label=f"row {i}") for i in range(len(x))], "the releases differ"),
        (lambda x: released(x, multiplier=float(len(x))), "another sensitivity or noise"),
        (lambda x: released(x, sensitivity=float(len(x))), "another sensitivity or noise"),
        (lambda x: released(x, axis=None if len(x) % 2 else 0), "another claim"),
        (lambda x: released(x[:, : len(x)]), "another shape or type"),
        (lambda x: (released(x), released(x)), "one key serves noise of sum"),
        (lambda x: released(x, key=jax.random.key(len(x))), "another key"),
        (lambda x: from_a_sample(x, 1 / len(x)), "sampled in another way"),
        (lambda x: (released(x), _watch.key_used(KEY, "dropout")), "noise of sum and dropout"),
        (lambda x: [whole_sample(seed=2) is None for _ in range(2)], "one key serves sampling"),
        pytest.param(
            lambda x: _watch.public(7, "seven") if len(x) % 2 else 7,
            "seven is declared to be public in one run alone",
            id="public",
        ),
    ],
)
def test_every_other_difference_is_named(program, said):
    with pytest.raises(AssertionError, match=said):
        audit.replay(program, DATA, DATA[1:]).check()


def test_a_public_name_stands_for_one_value():
    """Of two values the second run would be given one, and what the other follows from would not be seen."""

    def program(x, names):
        return [_watch.public(value, name) for name, value in zip(names, (4, len(x)), strict=True)]

    audit.replay(lambda x: program(x, ("rows before", "rows")), DATA, DATA[1:]).check()
    audit.record(lambda x: program(x, ("rows", "rows")), DATA)  # one value under a name used twice
    for data in ((DATA[1:], DATA), (DATA, DATA[1:])):  # in the first run, and in the second
        with pytest.raises(ValueError, match="rows was 4 and is 3"):
            audit.replay(lambda x: program(x, ("rows", "rows")), *data)


def test_all_leaves_of_a_release_count():
    def program(x):
        exact = [np.zeros(2), x.sum(0), x[:, 0].sum()]
        return noise.release(
            KEY, exact, sensitivity=[1.0, 0.5, 1.0], noise_multiplier=1.0, label=""
        )

    found = audit.replay(program, DATA, DATA[1:])
    assert found.largest_ratio == pytest.approx(np.hypot(2, 1))


def seen(exact, **about):
    return Seen("sum", about, (), [np.asarray(exact)], [np.ones(())], [], 1.0, None)


def test_the_parts_of_a_release_move_it_together():
    about = {"norm": 2, "axis": None, "parts": 2}
    first = [seen([0.0], **about), seen([0.0], **about)]
    (found,) = compare(first, [seen([0.6], **about), seen([-0.8], **about)])
    assert found.ratio == pytest.approx(1.0)


def test_of_two_covariances_either_may_be_the_neighbour():
    pair = [seen(np.diag([scale, 1.0]), change=1.0) for scale in (1.0, 0.5)]
    for one, other in (pair, pair[::-1]):
        assert compare([one], [other])[0].ratio == pytest.approx(1.0)


def test_files_and_folders_are_compared_and_what_is_not_covered_may_differ():
    def program(x, workdir):
        (workdir / "in" / f"of {len(x)}").mkdir(parents=True)
        (workdir / "loss.txt").write_text(str(x.sum()))
        return released(x)

    # Each folder is in one run alone.
    said = r"file/in/of 3/ differs; file/in/of 4/ differs; file/loss\.txt differs"
    with pytest.raises(AssertionError, match=said):
        audit.replay(program, DATA, DATA[1:]).check()
    audit.replay(program, DATA, DATA[1:], ignore=["file/loss.txt", "file/in/*"]).check()


def test_epsilon_follows_from_the_noise_that_was_drawn():
    """Of a program with defaults too, which is given no folder in place of one."""

    def program(x, multiplier=3.0):
        return [released(x, key=key, multiplier=multiplier) for key in jax.random.split(KEY, 2)]

    found = audit.record(program, DATA)
    assert found.epsilon(1e-5) == pytest.approx(gaussian_epsilon(3.0, 1e-5, compositions=2))


def test_what_is_returned_is_compared_by_its_content():
    """A table of 1,000 rows prints ten of them, and an object prints where it lies."""
    x = np.arange(1000.0)
    kinds = [
        lambda x: pd.DataFrame({"x": x}),
        lambda x: pd.Series(x),
        lambda x: sparse.csr_array(x[None]),
        lambda x: np.array([f"{row}" for row in x], object),
        lambda x: np.ma.masked_array(np.zeros(1000), x < 0),
        lambda x: complex(x[500]),
    ]
    for kind in kinds:
        audit.replay(kind, x, x.copy()).check()
        with pytest.raises(AssertionError, match="result differs"):
            audit.replay(kind, x, np.where(x == 500, -1, x)).check()
    audit.replay(lambda x: (float("nan"), object(), -0.0), x, x).check()
    for kind in (
        lambda x: 0.0 if len(x) % 2 else -0.0,
        lambda x: np.zeros(2, np.int32 if len(x) % 2 else np.float32),
    ):
        with pytest.raises(AssertionError, match="result differs"):
            audit.replay(kind, x, x[1:]).check()


def test_what_cannot_be_compared_is_named():
    program = lambda x: {"scale": lambda y: x * y}  # noqa: E731
    with pytest.raises(ValueError, match="result/scale is a function, which cannot be compared"):
        audit.record(program, DATA)
    assert "result/scale" not in audit.record(program, DATA, ignore=["result/scale"]).left


def steps(x, probabilities, together):
    """Two trainings of one step or more, one after the other or step by step."""
    batches = [
        dpx.poisson_batches(len(x), sampling_probability=q, steps=3, seed=seed)
        for seed, q in enumerate(probabilities)
    ]
    for step, drawn in enumerate(zip(*batches, strict=True) if together else map(list, batches)):
        for seed in range(len(drawn)):
            released(x, key=jax.random.fold_in(KEY, 3 * step + seed), label=f"gradients {seed}")


def test_samples_that_are_cut_off_cannot_be_priced():
    with pytest.raises(ValueError, match="max_batch_size=3 must be None in a replay"):
        audit.record(lambda x: list(whole_sample(seed=2, max_batch_size=3)), DATA)


@pytest.mark.parametrize("draw", [dpx.poisson_batches, dpx.training.allocated_batches])
def test_two_releases_of_one_batch_are_not_priced_as_those_of_two(draw):
    """By random allocation six releases of three batches counted as less than three of them."""

    def program(x, releases):
        drawn = draw(len(x), sampling_probability=1 / 3, steps=3, seed=0)
        for step, _ in enumerate(drawn):
            for part in range(releases):
                key = jax.random.fold_in(KEY, 7 * step + part)
                released(x, key=key, label=f"gradients of part {part}")

    assert audit.record(lambda x: program(x, 1), DATA).epsilon(1e-5) > 0
    twice = audit.record(lambda x: program(x, 2), DATA)
    with pytest.raises(ValueError, match="released more often than batches were drawn"):
        twice.epsilon(1e-5)


def test_each_gradient_is_priced_by_its_own_sample():
    found = audit.record(lambda x: steps(x, (0.9, 0.1), together=False), DATA)
    ledger = dpx.Ledger()
    for q in (0.9, 0.1):
        ledger.spend(privacy.dpsgd_event(2.0, sampling_probability=q, steps=3), f"at {q}")
    assert found.epsilon(1e-5) == pytest.approx(ledger.guarantee(1e-5).epsilon, rel=1e-6)
    found = audit.record(lambda x: steps(x, (0.9, 0.1), together=True), DATA)
    with pytest.raises(ValueError, match="different samplings were open at once"):
        found.epsilon(1e-5)
