"""The training loop, replayed on neighbours, and what its noise cost in fact."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

import dpx
from dpx import audit
from dpx.training.keys import Keys
from experiments.dp_transformer import training

# They move with the data, as is said (`not_covered`), hold times, or are for the folder's owner alone.
IGNORED = ["stderr", "file/metrics.jsonl", "file/checkpoints/*", "file/secret/*"]
CONFIG = ConfigDict(
    {
        "steps": 5,
        "batch_size": 9.0,
        "microbatch_size": 4,
        "learning_rate": 0.1,
        "warmup": 0.2,
        "weight_decay": 0.0,
        "l2_clip_norm": 0.5,
        "normalize": False,
        "accountant": "pld",
        "log_every": 5,
        "checkpoint_every": 5,
    }
)


def loss_fn(params, x, key):
    """With gradients far beyond the threshold, in directions that dropout chooses."""
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return 10 * jnp.where(kept, x, 1 - x) @ params["w"] + 10 * params["b"]


pytestmark = pytest.mark.usefixtures("recording")


@pytest.fixture(scope="module")
def private():
    """A budget, calibrated once."""
    return training.make_private(CONFIG, 2.0, 1e-5, 30, "record", ())


def program(private, noise_secret=5, sampling_secret=5):
    def train(rows, workdir):
        noise = jax.random.key(noise_secret)
        sampling = np.random.SeedSequence(sampling_secret)
        start = {"w": jnp.zeros(6), "b": jnp.zeros(())}
        options = {"keys": Keys(noise, sampling), "label": "run", "privacy": private[0]}
        trained = training.train(loss_fn, start, (rows,), CONFIG, workdir=workdir, **options)
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        return {"params": trained, "spent": json.loads(lines[-1])["epsilon"]}

    return train


ROWS = np.random.default_rng(0).integers(0, 2, (30, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def first(private):
    return audit.record(program(private), ROWS, ignore=IGNORED)


def test_a_record_moves_each_step_by_its_clipped_gradient_alone(private, first):
    """Masks, batches, normaliser and control flow stay as they are when a record leaves."""
    ratios = []
    for index in (0, 14, 29):
        ids = np.delete(np.arange(30), index)
        found = audit.replay(
            program(private), ROWS, ROWS[ids], ids=ids, first=first, ignore=IGNORED
        )
        ratios.append(found.check().largest_ratio)
    assert max(ratios) > 0.999
    assert first.public == {"the number of records": 30}


def test_the_noise_of_all_steps_costs_what_is_stated(private, first):
    assert [seen.label for seen in first.releases] == ["gradients of run"] * CONFIG.steps
    cost = first.epsilon(1e-5)
    assert private[1].epsilon == pytest.approx(cost, rel=2e-3)
    assert first.left["result/spent"] == pytest.approx(cost, rel=2e-3)
    assert cost <= 2.0
    spread = np.concatenate(
        [np.ravel(n - e) for s in first.releases for n, e in zip(s.noisy, s.exact, strict=True)]
    )
    # Of 35 draws; the multiplier states the noise on the sum, in units of the threshold.
    assert spread.std() / 0.5 == pytest.approx(private[0].noise_multiplier, rel=0.5)


def test_all_randomness_comes_from_its_own_secret(private, first):
    """Noise and dropout follow from one, and sampling from the other, each step anew."""

    def keys(run):
        found = {purpose: {w for p, w in run.keys if p == purpose} for purpose, _ in run.keys}
        return {**found, "noise": {seen.key for seen in run.releases}}

    ours = keys(first)
    sizes = {"noise": CONFIG.steps, "dropout": CONFIG.steps, "sampling": 1}
    assert {purpose: len(words) for purpose, words in ours.items()} == sizes
    for which, secrets in (("noise", (6, 5)), ("sampling", (5, 6))):
        theirs = keys(audit.record(program(private, *secrets), ROWS, ignore=IGNORED))
        moved = {purpose for purpose in ours if not ours[purpose] & theirs[purpose]}
        kept = {purpose for purpose in ours if ours[purpose] == theirs[purpose]}
        assert moved == ({"sampling"} if which == "sampling" else {"noise", "dropout"})
        assert kept == set(ours) - moved


COUNTS = np.array([2, 1, 50, 3, 9, 1, 4, 25, 6, 2, 1, 3])
NAMES = [f"user {number:02}" for number in range(len(COUNTS))]


def table():
    """Rows of users in any order: a name, and numbers that all differ."""
    rng = np.random.default_rng(0)
    whose = rng.permutation(np.repeat(np.arange(len(COUNTS)), COUNTS))
    return [(NAMES[user], rng.normal(size=6)) for user in whose]


def fitted(**changes):
    """`dpx.training.fit` as a whole: calibration, dropout keys, microbatches and checkpoints."""

    def program(rows, workdir):
        own = {}
        if isinstance(rows, list):
            names, rows = zip(*rows, strict=True)
            own = {"users": names, "records_per_user": 4}
        trained = dpx.training.fit(
            loss_fn,
            {"w": jnp.zeros(6), "b": jnp.zeros(())},
            np.array(rows, np.float32),
            epsilon=2.0,
            delta=1e-5,
            optimizer=optax.adam(0.1),
            l2_clip_norm=0.5,
            key=jax.random.key(3),
            microbatch_size=4,
            record_key=True,
            workdir=workdir,
            **own,
            **changes,
        )
        return {"params": trained.params, "epsilon": trained.guarantee.epsilon}

    return program


def test_a_fit_moves_by_its_clipped_gradients_and_costs_what_it_states():
    fit = fitted(batch_size=9, steps=5)
    first = audit.record(fit, ROWS, ignore=IGNORED)
    ids = np.delete(np.arange(30), 14)
    found = audit.replay(fit, ROWS, ROWS[ids], ids=ids, first=first, ignore=IGNORED).check()
    assert 0.999 < found.largest_ratio <= 1 + 1e-6
    assert len(first.releases) == 5
    assert first.left["result/epsilon"] == pytest.approx(first.epsilon(1e-5), rel=2e-3)
    other = {words for purpose, words in first.keys if purpose != "noise"}
    noise = {seen.key for seen in first.releases}
    # Five masks and one sampler, none of which shares a key with the noise.
    assert (len(noise), len(other)) == (5, 6)
    assert not noise & other


@pytest.mark.parametrize(
    "sampling", ["poisson", pytest.param("allocation", marks=pytest.mark.slow)]
)
def test_a_user_moves_each_step_by_their_clipped_gradient_alone(sampling):
    rows, fit = table(), fitted(batch_size=6, steps=4, sampling=sampling)
    # Who stands before all others, with the most records, and one whose name is read as a number.
    odd = [("7", np.full(6, 1e30)), *rows, *[(" 7 ", np.full(6, -1e30))] * 9]
    neighbours = [(odd, np.array([len(NAMES), *range(len(NAMES))]))]
    for gone in (0, 2, 11):
        kept = [row for row in rows if row[0] != NAMES[gone]]
        neighbours.append((kept, np.delete(np.arange(len(NAMES)), gone)))
    first = audit.record(fit, rows, ignore=IGNORED)
    ratios = [
        audit.replay(fit, rows, other, ids=ids, first=first, ignore=IGNORED).check().largest_ratio
        for other, ids in neighbours
    ]
    assert min(ratios[1:]) > 0.99
    assert len(first.releases) == 4
    assert first.public == {"the number of records": len(NAMES)}
    assert first.left["result/epsilon"] == pytest.approx(first.epsilon(1e-5), rel=2e-3)
