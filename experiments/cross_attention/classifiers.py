"""Classifiers of documents by their keys: a private memory's, and what stands beside it in the table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from dpx import cross_attention
from dpx.noise import release
from dpx.privacy import PrivacyGuarantee, gaussian_noise_multiplier
from dpx.training import Keys
from dpx.training.calibration import calibrate
from experiments import checks, guarantees
from experiments.cross_attention.labelled import Documents

UNIT = "row of (K, V)"  # a document


def accuracy(scores, truth: np.ndarray) -> float:
    """The share of rows whose largest score is that of the true group."""
    return float((np.asarray(scores).argmax(1) == truth).mean())


def memory_scores(memory: cross_attention.Sketch, queries) -> np.ndarray:
    """What a memory gives each group, per document of the group: (m, groups)."""
    masses = np.asarray(memory.sums(jnp.asarray(queries)))[:, 1:]
    sizes = np.asarray(memory.sums(jnp.zeros((1, queries.shape[1]))))[:, 1:]
    return masses / np.maximum(sizes, 1)


def class_means(*data: Any, **budget: Any) -> tuple[np.ndarray, PrivacyGuarantee]:
    """Noisy mean keys of each class, (groups, dim), from `class_sums`, which says what it takes."""
    sums, _, spent = class_sums(*data, **budget)
    return sums[:, 1:] / np.maximum(2 * sums[:, :1], 1), spent


def class_sums(
    key: jax.Array,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    epsilon: float,
    delta: float,
    unit: str = UNIT,
) -> tuple[np.ndarray, float, PrivacyGuarantee]:
    """Noisy sums of (1/2, k) over the documents of each class, (groups, 1 + dim), and the noise's deviation.

    Adding or removing a document moves the sums by (1/2, k) in one class, of norm at most √5/2. So does a
    unit of several documents, by a mean of such vectors, if their `values` (n, groups) add up to one.
    """
    spent = guarantee(epsilon, delta, "Gaussian mechanism on sums over classes", unit)
    rows = np.concatenate([np.full((len(keys), 1), 0.5), keys], axis=1)
    sensitivity = np.sqrt(5) / 2 * (1 + 1e-6)
    noise_multiplier = gaussian_noise_multiplier(epsilon, delta)
    sums = release(
        key,
        values.astype(np.float64).T @ rows,
        sensitivity=sensitivity,
        noise_multiplier=noise_multiplier,
        label="class means",
    )
    return np.asarray(sums), sensitivity * noise_multiplier, spent


def nearest_mean(queries: np.ndarray, sums: np.ndarray, deviation: float) -> np.ndarray:
    """Scores (m, groups) of queries, of which the largest is that of the class with the nearest mean.

    Each mean is drawn towards that of all classes by the share of its distance that is noise (James and
    Stein, 1961), so that small classes, whose means are mostly noise, attract nothing.
    """
    sizes = np.maximum(2 * sums[:, :1], 1)
    center = sums[:, 1:].sum(axis=0) / sizes.sum()
    apart = sums[:, 1:] / sizes - center
    noise = apart.shape[1] * np.square(deviation / sizes)
    squares = np.maximum(np.square(apart).sum(axis=1, keepdims=True), 1e-300)
    apart *= np.maximum(1 - noise / squares, 0)
    return (queries - center) @ apart.T - np.square(apart).sum(axis=1) / 2


def guarantee(epsilon: float, delta: float, mechanism: str, unit: str = UNIT) -> PrivacyGuarantee:
    """Of one Gaussian release about documents that come or go."""
    return guarantees.gaussian(epsilon, delta, mechanism, unit)


def check_regression(config, num_documents: int | None) -> None:
    """Raises ValueError for a section `regression` that cannot be used; None documents where none is made."""
    checks.integers(config, "regression.steps", "regression.batch_size")
    checks.positive(config, "regression.learning_rate", "regression.l2_clip_norm")
    if num_documents is not None and config.regression.batch_size > num_documents:
        raise ValueError(
            f"config.regression.batch_size={config.regression.batch_size} must be at most {num_documents}, "
            "the number of private documents: use a smaller one"
        )


def plan_regression(config, num_documents: int, unit: str = UNIT) -> PrivacyGuarantee:
    """What `private_regression` will cost."""
    about = config.regression
    _, spent = calibrate(
        epsilon=config.epsilon,
        delta=config.delta,
        num_examples=num_documents,
        batch_size=about.batch_size,
        steps=about.steps,
        l2_clip_norm=about.l2_clip_norm,
        normalize=False,
        accountant="pld",
        unit=unit,
        assumptions=(),
    )
    return spent


def private_regression(
    config, keys: Keys, data: Documents, unit: str = UNIT
) -> dpx.training.Trained:
    """Multinomial logistic regression by DP-SGD."""
    about = config.regression
    shape = data.keys.shape[1], data.num_groups
    params = {"weights": jnp.zeros(shape), "bias": jnp.zeros(shape[1])}

    def loss(params, x, label):
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), label)

    trained = dpx.training.fit(
        loss,
        params,
        (data.keys, data.labels),
        epsilon=config.epsilon,
        delta=config.delta,
        batch_size=about.batch_size,
        steps=about.steps,
        sampling="poisson",
        optimizer=optax.adam(optax.cosine_decay_schedule(about.learning_rate, about.steps)),
        l2_clip_norm=about.l2_clip_norm,
        key=keys,
        label="logistic_regression",
    )
    # A row of these arrays is what the other releases call so.
    return trained._replace(guarantee=dataclasses.replace(trained.guarantee, unit=unit))


def logits(params, x):
    return x @ params["weights"] + params["bias"]
