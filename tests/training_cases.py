"""What tests of trainings share: a call of `fit` that takes no time, and the kill of a call."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx.training import Keys, loop
from dpx.training import keys as secrets
from dpx.training.log import Progress

X = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 3.0], np.float32)
USERS = np.arange(100) // 8  # thirteen, of whom one has four records and the others eight
KEY = jax.random.key(1 << 40)
PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(())}
SETTINGS: dict[str, Any] = {
    "epsilon": 2.0,
    "delta": 1e-3,
    "batch_size": 20,
    "sampling": "poisson",
    "steps": 6,
    "optimizer": optax.sgd(0.1),
    "l2_clip_norm": 0.5,
    "key": KEY,
    "log_every": 1,
    "checkpoint_every": 1,
    "progress": False,
}
# What a replay leaves out: the log and the secrets of the data's owner, and checkpoints, which hold times.
PRIVATE_FILES = ["stderr", "file/metrics.jsonl", "file/checkpoints/*", "file/secret/*"]


def loss_fn(params, x, y):
    return (x @ params["w"] + params["b"] - y) ** 2


def fit(data: Any = (X, Y), loss: Any = loss_fn, params: Any = PARAMS, **changes):
    return dpx.training.fit(loss, params, data, **SETTINGS | changes)


def keys(label="training"):
    """The keys of a training of `fit`, from whose key they follow."""
    return secrets.derive(KEY).training(label)


def secure(secret=b"s" * 32, seed=5):
    """What makes a training draw from a cryptographic stream, under a secret."""
    keys = Keys(jax.random.key(seed), np.random.SeedSequence(seed), secret)
    return {"secure": True, "key": keys}


def of_users(records_per_user=4, batch_size=4):
    return {"users": USERS, "records_per_user": records_per_user, "batch_size": batch_size}


@contextlib.contextmanager
def killed_at(step):
    """A context in which a training is killed when it has done that many steps."""
    line = Progress.line

    def stop(self, done, *rest):
        if done == step:
            raise KeyboardInterrupt
        line(self, done, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "line", stop)
        with pytest.raises(KeyboardInterrupt):
            yield


@contextlib.contextmanager
def seen_steps(see):
    """A context in which `see` runs the step of a training: a function of what `jax.jit` makes of it."""
    jit = jax.jit

    def watched(function, **settings):
        jitted = jit(function, **settings)
        of_step = getattr(function, "func", None) is loop._step
        return functools.partial(see, jitted) if of_step else jitted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", watched)
        yield


def same(one, other):
    """Asserts that two trees are the same to the last bit."""
    jax.tree.map(np.testing.assert_array_equal, one, other)


def close(one, other, atol=1e-5):
    """Asserts that two trees are the same but for rounding."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), one, other)
