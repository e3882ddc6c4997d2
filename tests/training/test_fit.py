"""`dpx.training.fit`: anyone's model, anyone's data, in one call."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpx

X = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 3.0], np.float32)
PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(())}
SETTINGS = {
    "epsilon": 2.0,
    "delta": 1e-3,
    "batch_size": 20,
    "steps": 6,
    "optimizer": optax.sgd(0.1),
    "l2_clip_norm": 0.5,
    "log_every": 1,
    "checkpoint_every": 2,
}


def loss_fn(params, x, y):
    return (x @ params["w"] + params["b"] - y) ** 2


def fit(data=(X, Y), loss=loss_fn, params=PARAMS, **changes):
    settings = SETTINGS | {"key": jax.random.key(0)} | changes
    return dpx.training.fit(loss, params, data, **settings)


def test_digits():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(x / 16, y, random_state=0)
    model = nnx.Linear(64, 10, rngs=nnx.Rngs(0))

    def loss_fn(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y)

    trained = dpx.training.fit(
        loss_fn,
        model,
        (train_x, train_y),
        epsilon=3.0,
        delta=1e-4,
        batch_size=1000,
        steps=60,
        optimizer=optax.sgd(4.0, momentum=0.9),
        l2_clip_norm=1.0,
        key=dpx.secret_key(),
    )
    accuracy = (trained.params(test_x).argmax(axis=1) == test_y).mean()
    print(accuracy, [r.loss for r in trained.history])
    assert accuracy >= 0.93
    assert trained.guarantee.epsilon <= 3
