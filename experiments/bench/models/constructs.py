"""Whole small models and losses of forms that layers alone do not have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.models.building import BATCH, integers, normal, plain, toward, weights
from experiments.bench.models.measure import Case

WIDTH, LENGTH, VOCABULARY = 64, 24, 1024


def pooled_embedding(p, tokens):
    """The mean of looked-up rows, and a sampled output layer."""
    user = jnp.take(p["table"], tokens, axis=0).mean(0)
    return p["table"][tokens[:8]] @ user + p["bias"][tokens[:8]]


def factorisation(p, user, item):
    """Matrix factorisation: two look-ups and a product of them."""
    return jnp.dot(p["users"][user], p["items"][item])[None]


def contrastive(p, x, y):
    """Two towers with normalised outputs and a temperature."""

    def tower(x, w):
        h = jnp.tanh(x @ w)
        return h / jnp.linalg.norm(h, axis=-1, keepdims=True)

    return jnp.exp(p["temperature"]) * tower(x, p["a"]) @ tower(y, p["b"]).T


def graph_layer(p, x, edges):
    """Messages along edges by `segment_sum`."""
    messages = jnp.tanh(x[edges[:, 0]] @ p["message"])
    return x @ p["own"] + jax.ops.segment_sum(messages, edges[:, 1], num_segments=LENGTH)


def spectral_layer(p, x):
    """A Fourier layer: products of complex numbers with the lowest frequencies."""
    modes = jnp.fft.rfft(x, axis=0)[:8]
    weight = p["re"] + 1j * p["im"]
    return jnp.fft.irfft(jnp.einsum("kd,kdf->kf", modes, weight), n=LENGTH, axis=0)


def variational(p, x, key):
    """An autoencoder that draws its code, with a key for each record."""
    mean, log_scale = jnp.split(x @ p["encode"], 2)
    code = mean + jnp.exp(log_scale) * jax.random.normal(key, mean.shape)
    divergence = 0.5 * jnp.sum(jnp.exp(2 * log_scale) + mean**2 - 1 - 2 * log_scale)
    return toward(code @ p["decode"]) + 0.01 * divergence


def energy(p, x):
    """A loss on the derivative of the model by its input, as of a force."""
    value = lambda x: jnp.sum(jnp.tanh(x @ p["w"]) @ p["v"])  # noqa: E731
    return jax.grad(value)(x)


def hyper_network(p, x):
    """A weight that the example makes."""
    made = (x[0] @ p["make"]).reshape(WIDTH, 8)
    return x @ made + x @ p["own"]


def fixed_point(p, x):
    """Newton-like steps within the loss."""
    y = jnp.zeros_like(x)
    for _ in range(3):
        y = y - 0.3 * (y - jnp.tanh(y @ p["w"] + x))
    return y


def labels_loss(p, x, label):
    """Label smoothing with a focal weight."""
    logits = jax.nn.relu(x @ p["w"]) @ p["out"]
    target = optax.smooth_labels(jax.nn.one_hot(label, 10), 0.1)
    return jnp.sum(optax.sigmoid_focal_loss(logits, target))


def state_space(p, x):
    """A diagonal state-space layer, whose kernel is a function of parameters alone."""
    decay = jnp.exp(-jnp.exp(p["rate"]))
    powers = decay[None] ** jnp.arange(LENGTH)[:, None]
    kernel = powers * p["in"] * p["out"]
    places = np.arange(LENGTH)
    lag = np.clip(places[:, None] - places, 0, None)
    return jnp.einsum("tsd,sd->td", kernel[lag] * np.tril(np.ones((LENGTH, LENGTH)))[..., None], x)


CASES = {
    "pooled embedding, sampled output": lambda: plain(
        pooled_embedding, weights(table=(VOCABULARY, WIDTH), bias=(VOCABULARY,)),
        integers(VOCABULARY, LENGTH)),
    "matrix factorisation": lambda: plain(
        factorisation, weights(users=(2048, 32), items=(2048, 32)), integers(2048), integers(2048, seed=1)),
    "contrastive towers": lambda: plain(
        contrastive, weights(a=(WIDTH, 32), b=(WIDTH, 32), temperature=()),
        normal(LENGTH, WIDTH), normal(LENGTH, WIDTH, seed=1)),
    "messages on a graph": lambda: plain(
        graph_layer, weights(message=(WIDTH, WIDTH), own=(WIDTH, WIDTH)), normal(LENGTH, WIDTH),
        integers(LENGTH, 60, 2)),
    "Fourier layer": lambda: plain(
        spectral_layer, weights(re=(8, WIDTH, WIDTH), im=(8, WIDTH, WIDTH)), normal(LENGTH, WIDTH)),
    "variational autoencoder": lambda: Case(
        variational, weights(encode=(WIDTH, 32), decode=(16, WIDTH)),
        (normal(WIDTH), jax.random.split(jax.random.key(0), BATCH))),
    "derivative by the input": lambda: plain(
        energy, weights(w=(WIDTH, WIDTH), v=(WIDTH, 1)), normal(LENGTH, WIDTH)),
    "weights made by the example": lambda: plain(
        hyper_network, weights(make=(WIDTH, 8 * WIDTH), own=(WIDTH, 8)), normal(LENGTH, WIDTH)),
    "unrolled fixed point": lambda: plain(fixed_point, weights(w=(WIDTH, WIDTH)), normal(LENGTH, WIDTH)),
    "focal loss of smooth labels": lambda: Case(
        labels_loss, weights(w=(WIDTH, WIDTH), out=(WIDTH, 10)), (normal(WIDTH), integers(10))),
    "state-space kernel": lambda: plain(
        state_space, weights(rate=(WIDTH,)) | {"in": jnp.ones(WIDTH), "out": jnp.ones(WIDTH)},
        normal(LENGTH, WIDTH)),
}  # fmt: skip
