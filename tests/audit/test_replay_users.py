"""`dpx.training.fit` for users, replayed without and with a whole user."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import audit

IGNORED = ["stderr", "file/metrics.jsonl", "file/checkpoints/*", "file/secret/*"]
COUNTS = np.array([2, 1, 50, 3, 9, 1, 4, 25, 6, 2, 1, 3])
NAMES = [f"user {number:02}" for number in range(len(COUNTS))]


def table():
    """Rows of users in any order: a name, and numbers that all differ."""
    rng = np.random.default_rng(0)
    whose = rng.permutation(np.repeat(np.arange(len(COUNTS)), COUNTS))
    return [(NAMES[user], rng.normal(size=6)) for user in whose]


def loss_fn(params, x, key):
    """With gradients far beyond the threshold, in directions that dropout chooses."""
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return 10 * jnp.where(kept, x, 1 - x) @ params["w"] + 10 * params["b"]


def fitted(sampling):
    def program(rows, workdir):
        names, x = zip(*rows, strict=True)
        trained = dpx.training.fit(
            loss_fn,
            {"w": jnp.zeros(6), "b": jnp.zeros(())},
            np.array(x, np.float32),
            users=names,
            records_per_user=4,
            epsilon=2.0,
            delta=1e-5,
            batch_size=6,
            steps=4,
            sampling=sampling,
            optimizer=optax.adam(0.1),
            l2_clip_norm=0.5,
            key=jax.random.key(3),
            microbatch_size=4,
            record_key=True,
            workdir=workdir,
        )
        return {"params": trained.params, "epsilon": trained.guarantee.epsilon}

    return program


@pytest.fixture(scope="module", autouse=True)
def _recording():
    with audit.recording():
        yield


def without(rows, gone):
    kept = [row for row in rows if row[0] != NAMES[gone]]
    return kept, np.delete(np.arange(len(NAMES)), gone)


@pytest.mark.parametrize(
    "sampling", ["poisson", pytest.param("allocation", marks=pytest.mark.slow)]
)
def test_a_user_moves_each_step_by_their_clipped_gradient_alone(sampling):
    rows = table()
    # Who stands before all others, with the most records, and one whose name is read as a number.
    odd = [("7", np.full(6, 1e30)), *rows, *[(" 7 ", np.full(6, -1e30))] * 9]
    neighbours = [without(rows, gone) for gone in (0, 2, 11)]
    neighbours += [(odd, np.array([len(NAMES), *range(len(NAMES))]))]
    first = audit.record(fitted(sampling), rows, ignore=IGNORED)
    ratios = []
    for other, ids in neighbours:
        found = audit.replay(fitted(sampling), rows, other, ids=ids, first=first, ignore=IGNORED)
        ratios.append(found.check().largest_ratio)
    assert min(ratios[:3]) > 0.99
    assert len(first.releases) == 4
    assert first.public == {"the number of records": len(NAMES)}
    assert first.left["result/epsilon"] == pytest.approx(first.epsilon(1e-5), rel=2e-3)
