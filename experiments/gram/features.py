"""What one private Gram matrix of features is good for: principal components, and a regression.

A record is a document: 64 features of length 1 that a public corpus defines, and the one-hot vector of its
group. One release of the Gram matrix of both, with 84 rows, has all that linear regression needs, and the
principal components of the features. Beside it stand mechanisms that are made for one of these each, out of a
whole budget of their own.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpx import gram
from dpx.noise import release
from dpx.privacy import PrivacyGuarantee, gaussian_noise_multiplier
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan, compares
from dpx.training import keys as secrets
from experiments import checks
from experiments.cross_attention import classifiers, labelled
from experiments.cross_attention.retrieval import ASSUMED

UNIT = "column of X"  # a document
# Of the ridge without noise, of which training data choose.
PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
BOUND = np.sqrt(2)  # of a column: its features and its label have length 1 each
TITLES = {
    "gram": "one release of features and labels",
    "gram_features": "a release of the features alone",
    "power_method": "private power method",
    "public": "components of the public corpus",
    "exact": "exact, not private",
    "class_means": "private class means",
    "logistic_regression": "private logistic regression",
}
NOT_COVERED = [
    "losses of the logistic regression and its realised batch sizes (the progress line)",
    "the row exact, which is not private",
    "accuracies on held-out documents, and captured shares of the private documents' variance",
    "settings of the embedding and of the regression, which were chosen on this public data set",
]


def validate(config) -> None:
    """Raises ValueError for a value that cannot be used."""
    labelled.check(config)
    checks.integers(config, "power_steps")
    checks.each(config, "components", least=1)
    classifiers.check_regression(config, labelled.size(config)[0] if compares(config) else None)
    for count in config.components:
        if not 1 <= count < config.dim:
            raise ValueError(
                f"config.components={tuple(config.components)} must be from 1 to {config.dim - 1}, less than "
                "config.dim"
            )


def plan(config) -> Plan:
    """What a run will release, and the noise of an entry of the Gram matrix, with labels and without."""
    multiplier = gaussian_noise_multiplier(config.epsilon, config.delta)
    spent = _guarantee(config.epsilon, config.delta, "Gaussian mechanism")
    releases = {"gram": spent}
    if compares(config):
        releases |= dict.fromkeys(("gram_features", "class_means"), spent)
        releases |= {f"components={count}/power_method": spent for count in config.components}
        documents = len(labelled.load(config).keys)
        releases["logistic_regression"] = classifiers.plan_regression(config, documents, UNIT)
    parameters = {
        "noise_multiplier": multiplier,
        "noise_std_with_labels": multiplier * BOUND**2,
        "noise_std_of_features": multiplier,
    }
    return Plan(releases, parameters)


def _guarantee(epsilon: float, delta: float, mechanism: str) -> PrivacyGuarantee:
    return classifiers.guarantee(epsilon, delta, mechanism, UNIT)


def run(config, workdir: Path) -> Outcome:
    """Shares of the variance that components capture, and accuracies of regressions."""
    data = labelled.load(config)
    # The power method starts from the public documents.
    begun = (data.keys, data.labels, data.public)
    synthetic = bool(config.data.generated)
    keys = secrets.open_keys(config, workdir, synthetic=synthetic, data=begun)
    budget: dict[str, Any] = {"epsilon": config.epsilon, "delta": config.delta}
    about: dict[str, Any] = budget | {"neighboring": "add_or_remove_one"}
    labels = np.eye(data.num_groups, dtype=np.float32)[data.labels]
    both = gram.release(
        keys.noise("gram"),
        np.concatenate([data.keys, labels], axis=1).T,
        column_bound=BOUND,
        **about,
    )
    releases = {"gram": both.guarantee}
    exact = data.keys.T.astype(np.float64) @ data.keys
    matrices = {
        "gram": both.matrix[: config.dim, : config.dim],
        "public": data.public.T @ data.public,
        "exact": exact,
    }
    if compares(config):
        alone = gram.release(keys.noise("gram_features"), data.keys.T, column_bound=1.0, **about)
        matrices["gram_features"], releases["gram_features"] = alone.matrix, alone.guarantee
    measures = []
    for count in config.components:
        bases = {name: leading(matrix, count) for name, matrix in matrices.items()}
        if compares(config):
            start, row = leading(matrices["public"], count), f"components={count}/power_method"
            bases["power_method"], releases[row] = power_method(
                keys.noise(row), exact, start, config.power_steps, **budget
            )
        measures += [
            Measure(name, "captured", captured(exact, basis), settings={"components": count})
            for name, basis in bases.items()
        ]
    scores = {
        "gram": data.queries @ ridge(both.matrix, config.dim, float(both.noise_std or 0)),
        "exact": data.queries @ _best_ridge(data.keys, labels, config.seed),
    }
    if compares(config):
        means, releases["class_means"] = classifiers.class_means(
            keys.noise("class_means"), data.keys, labels, unit=UNIT, **budget
        )
        trained = classifiers.private_regression(config, keys, data, unit=UNIT)
        releases["logistic_regression"] = trained.guarantee
        scores["class_means"] = data.queries @ means.T
        scores["logistic_regression"] = classifiers.logits(trained.params, data.queries)
    releases = {row: spent.assuming(ASSUMED) for row, spent in releases.items()}
    measures += [
        Measure(name, "accuracy", classifiers.accuracy(score, data.truth))
        for name, score in scores.items()
    ]
    return Outcome(
        measures=measures,
        headline=releases["gram"],
        releases=releases,
        not_covered=NOT_COVERED,
        titles=TITLES,
        headline_row="gram",
        comparisons=[
            Comparison(
                "captured", ["public", "gram_features", "power_method"], more_is_better=True
            ),
            Comparison("accuracy", ["class_means", "logistic_regression"], more_is_better=True),
        ],
        synthetic=synthetic,
        notes="Captured is the share of the features' variance in the span of the components. The release "
        "with labels serves the regression and all components together.",
    )


def _best_ridge(keys: np.ndarray, labels: np.ndarray, seed: int) -> np.ndarray:
    """Regression without noise, (dim, labels), with the penalty that is best for a tenth of the documents."""
    order = np.random.default_rng(seed).permutation(len(keys))
    asking, rest = np.split(order, [max(1, len(order) // 10)])

    def fit(rows: np.ndarray, penalty: float) -> np.ndarray:
        x = keys[rows].astype(np.float64)
        return np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ labels[rows])

    truth = labels[asking].argmax(axis=1)
    found = {
        penalty: classifiers.accuracy(keys[asking] @ fit(rest, penalty), truth)
        for penalty in PENALTIES
    }
    return fit(order, max(found, key=lambda penalty: found[penalty]))


def leading(matrix, count: int) -> np.ndarray:
    """Eigenvectors of the largest eigenvalues, (dim, count)."""
    return np.linalg.eigh(np.asarray(matrix, np.float64))[1][:, -count:]


def captured(exact: np.ndarray, basis: np.ndarray) -> float:
    """The share of the trace of X Xᵀ that lies in the span of an orthonormal basis."""
    return float(np.trace(basis.T @ exact @ basis) / np.trace(exact))


def ridge(matrix, dim: int, noise_std: float) -> np.ndarray:
    """Regression of the labels on the features, from the Gram matrix of both: (dim, labels).

    The ridge is σ·√(2·dim), about the largest eigenvalue of the noise, so that no direction of noise alone
    counts; at least 1.
    """
    matrix = np.asarray(matrix, np.float64)
    penalty = max(1.0, noise_std * np.sqrt(2 * dim))
    values, vectors = np.linalg.eigh(matrix[:dim, :dim])
    values = np.maximum(values, 0) + penalty
    return vectors @ ((vectors.T @ matrix[:dim, dim:]) / values[:, None])


def power_method(
    key: jax.Array,
    exact: np.ndarray,
    start: np.ndarray,
    steps: int,
    *,
    epsilon: float,
    delta: float,
) -> tuple[np.ndarray, PrivacyGuarantee]:
    """Components by subspace iteration with noise in each step (Hardt and Price, arXiv:1311.2495).

    A document x with ‖x‖ ≤ 1 that comes or goes moves X Xᵀ U by x (Uᵀ x)ᵀ, of norm at most 1 where U is
    orthonormal. All steps together are one Gaussian mechanism. Products have 64 bits: rounded to 32 they
    would move by more.

    Args:
      key: Of the noise.
      exact: X Xᵀ, (dim, dim).
      start: A public orthonormal basis, (dim, count).
      steps: How often the matrix is applied.
      epsilon, delta: The budget of all steps.
    """
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    basis = start
    for step in range(steps):
        noisy = release(
            jax.random.fold_in(key, step),
            exact @ basis,
            sensitivity=1 + 1e-5,
            noise_multiplier=multiplier * float(np.sqrt(steps)),
            label="step of the power method",
        )
        basis, _ = np.linalg.qr(np.asarray(noisy, np.float64))
    words = f"Gaussian mechanism on {steps} steps of the power method"
    return basis, _guarantee(epsilon, delta, words)
