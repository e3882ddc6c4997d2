"""The training loop as a section of a config runs it: pieces, noise, meshes and what is left on the disk."""

import re

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from training_cases import PARAMS, X, Y, close, same
from training_cases import loss_fn as loss_of_record

import dpx
from dpx.training import loop
from dpx.training.calibration import Privacy
from dpx.training.keys import Keys
from dpx.training.layout import Layout
from dpx.training.purposes import words_of
from experiments.dp_transformer import training

CONFIG = ml_collections.ConfigDict(
    {
        "steps": 6,
        "batch_size": 20.0,
        "microbatch_size": 8,
        "learning_rate": 0.1,
        "warmup": 0.2,
        "weight_decay": 0.0,
        "l2_clip_norm": 0.5,
        "normalize": False,
        "accountant": "pld",
        "log_every": 1,
        "checkpoint_every": 2,
    }
)


def loss_fn(params, x, y, key):
    del key
    return loss_of_record(params, x, y)


def keys(seed=0):
    return Keys(jax.random.key(seed), np.random.SeedSequence(seed))


def fit(workdir, private=True, mesh=None, evaluate=None, **changes):
    config = ml_collections.ConfigDict({**CONFIG.to_dict(), **changes})
    privacy = Privacy(0.5, False, 1.0, lambda steps: float(steps)) if private else None
    about = {"keys": keys(), "label": "run", "workdir": workdir, "privacy": privacy}
    return training.train(loss_fn, PARAMS, (X, Y), config, mesh=mesh, evaluate=evaluate, **about)


def privatize(noise_multiplier, seed=0):
    about = {"noise_multiplier": noise_multiplier, "expected_batch_size": 20.0}
    return dpx.privatize(l2_clip_norm=0.5, key=jax.random.key(seed), **about)


def step(piece, real, noise_multiplier):
    """The parameters after a step of SGD with learning rate 1 on the first `real` examples, in pieces."""
    privacy = Privacy(0.5, False, noise_multiplier, lambda steps: 0.0)
    optimizer = optax.chain(privatize(noise_multiplier), optax.sgd(1.0))
    indices = np.arange(48, dtype=np.int32)
    state, _ = loop._step(
        loss_fn,
        optimizer,
        privacy,
        Layout(None, len(X)),
        loop.Computation(microbatch_size=piece, record_key=True),
        (PARAMS, optimizer.init(PARAMS)),
        ((jnp.asarray(X), jnp.asarray(Y)), jnp.arange(len(X))),
        (indices, indices < real, -(-max(real, 1) // piece)),
        (jax.random.key(0), 0),
        None,
        None,
    )
    return state[0]


def slow_sum(real):
    """Clipped gradients, one example at a time."""
    total = jax.tree.map(jnp.zeros_like, PARAMS)
    for x, y in zip(X[:real], Y[:real], strict=True):
        gradient = jax.grad(loss_fn)(PARAMS, x, y, None)
        norm = optax.tree.norm(gradient)
        total = jax.tree.map(lambda t, g: t + g * min(1, 0.5 / norm), total, gradient)  # noqa: B023
    return total


@pytest.mark.quick_cases("48-8")
@pytest.mark.parametrize("real", [0, 1, 8, 30, 48])
@pytest.mark.parametrize("piece", [4, 16, 48])
def test_pieces_sum_to_the_clipped_gradients_over_the_expected_size(piece, real):
    expected = jax.tree.map(lambda g: -g / 20.0, slow_sum(real))
    close(step(piece, real, 0.0), expected, 1e-6)


@pytest.mark.quick_cases
@pytest.mark.parametrize("real", [0, 30])
def test_noise_enters_once_whatever_the_pieces(real):
    """Noisy minus noiseless is one draw of std σC/B, the same for one piece as for twelve."""
    noise = []
    for piece in (4, 48):
        noisy, clean = (step(piece, real, m) for m in (3.0, 0.0))
        noise.append(np.concatenate([np.ravel(noisy[k] - clean[k]) for k in ("w", "b")]))
    np.testing.assert_allclose(noise[0], noise[1], atol=1e-5)
    drawn = []
    for seed in range(300):
        transform = privatize(3.0, seed)
        drawn.append(transform.update(PARAMS, transform.init(PARAMS))[0]["w"])
    assert np.std(drawn) == pytest.approx(3.0 * 0.5 / 20.0, rel=0.1)
    assert np.abs(noise[0]).max() < 5 * 3.0 * 0.5 / 20.0


@pytest.mark.slow
def test_a_section_on_meshes_spreads_the_training_and_brings_it_back(tmp_path):
    assert training.sizes({"data": None, "model": 1}) is None
    assert training.sizes({"data": None, "model": 2}) == {"model": 2}
    seen = []
    evaluate = {"evaluate": lambda params: seen.append(params) or {}, "evaluate_every": 6}
    found = fit(tmp_path / "mesh", mesh={"data": 1, "model": 1}, **evaluate)
    for params in (found, seen[0]):
        assert isinstance(params["w"].sharding, jax.sharding.SingleDeviceSharding)
        same(params, fit(tmp_path / "one"))


@pytest.fixture
def programs_of(tmp_path):
    """What JAX compiles while a function runs, as text."""
    folder, before = tmp_path / "programs", jax.config.read("jax_dump_ir_to")
    jax.clear_caches()
    jax.config.update("jax_dump_ir_to", str(folder))

    def text(function):
        function()
        return "".join(path.read_text() for path in folder.iterdir())

    yield text
    jax.config.update("jax_dump_ir_to", before)


@pytest.mark.slow
def test_no_program_has_a_key_in_it(programs_of, tmp_path):
    """It would stay in a cache of compiled programs, which lies where the user puts it."""
    given = keys().training("run")
    words = [str(int(x)) for key in given[:2] for x in words_of(key)]
    text = programs_of(lambda: fit(tmp_path / "run"))
    assert "fold_in" in text or "threefry" in text
    assert not [x for x in words if re.search(rf"\b{x}\b", text)]
    closed = programs_of(lambda: jax.jit(lambda x: jax.random.normal(given.noise) + x)(1.0))
    assert all(re.search(rf"\b{x}\b", closed) for x in words[:2])


def test_ordinary_training_learns_and_saves_nothing(tmp_path):
    params = fit(tmp_path, private=False, steps=150, log_every=50)
    np.testing.assert_allclose(params["w"], [1, -2, 3], atol=0.3)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"batch_size": 101.0}, "sampling probability outside"),
        ({"batch_size": 0.0}, "sampling probability outside"),
        ({"steps": 0}, "steps"),
        ({"l2_clip_norm": 0.0}, "l2_clip_norm"),
        ({"warmup": 2.0}, "warmup"),
    ],
)
def test_bad_settings_are_named(changes, name):
    config = CONFIG.copy_and_resolve_references()
    config.update(changes)
    with pytest.raises(ValueError, match=name):
        training.check(config, 100)
