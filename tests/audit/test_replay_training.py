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

# Both move with the data, which is said (`not_covered`), or hold times.
IGNORED = ["stderr", "file/metrics.jsonl", "file/checkpoints/*"]
# A digest of the data, for the owner of the folder alone.
SECRET = "file/secret/*"
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


@pytest.fixture(scope="module")
def private():
    """A budget, calibrated once."""
    return training.make_private(CONFIG, 2.0, 1e-5, 30, "record", ())


@pytest.fixture(scope="module", autouse=True)
def _recording():
    with audit.recording():
        yield


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


def fitted(rows, workdir):
    """`dpx.training.fit` as a whole: calibration, dropout keys, microbatches and checkpoints."""
    trained = dpx.training.fit(
        loss_fn,
        {"w": jnp.zeros(6), "b": jnp.zeros(())},
        rows,
        epsilon=2.0,
        delta=1e-5,
        batch_size=9,
        steps=5,
        optimizer=optax.adam(0.1),
        l2_clip_norm=0.5,
        key=jax.random.key(3),
        microbatch_size=4,
        record_key=True,
        workdir=workdir,
    )
    return {"params": trained.params, "epsilon": trained.guarantee.epsilon}


def test_a_fit_moves_by_its_clipped_gradients_and_costs_what_it_states():
    ignore = [*IGNORED, SECRET]
    first = audit.record(fitted, ROWS, ignore=ignore)
    ids = np.delete(np.arange(30), 14)
    found = audit.replay(fitted, ROWS, ROWS[ids], ids=ids, first=first, ignore=ignore).check()
    assert 0.999 < found.largest_ratio <= 1 + 1e-6
    assert len(first.releases) == 5
    assert first.left["result/epsilon"] == pytest.approx(first.epsilon(1e-5), rel=2e-3)
    other = {words for purpose, words in first.keys if purpose != "noise"}
    noise = {seen.key for seen in first.releases}
    # Five masks and one sampler, none of which shares a key with the noise.
    assert (len(noise), len(other)) == (5, 6)
    assert not noise & other
