"""NoisyHead on texts: predicting a document's length from its words (Section 7 of arXiv 2504.16000)."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dpx import noisy_head
from dpx._validate import check_delta, check_epsilon
from dpx.data import newsgroups
from dpx.launch.experiment import Outcome, measures
from dpx.training.keys import open_keys
from experiments.noisy_head import figures as noisy_head_figures
from experiments.noisy_head.early_stopping import grid_of, stopped
from experiments.noisy_head.excess_risk import Method

ASSUMPTION = "a record is a prompt of non-empty documents; which documents are empty is public"
# The paper's R is meant for its model of the prompts; here both fits have the valid radius.
FITS = {
    "paper": {"accounting": "basic", "sensitivity": "paper", "objective": "paper"},
    "noisy_head": {"accounting": "last_iterate"},
}


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a bad value, before any text is used."""
    check_epsilon(config.epsilon, "config.epsilon")
    check_delta(config.delta)
    if config.data.source not in ("path", "sklearn"):
        raise ValueError(f"config.data.source={config.data.source!r}: use 'path' or 'sklearn'")
    if config.data.source == "path":
        if not config.data.path:
            raise FileNotFoundError(
                "set --config.data.path to a folder or table of texts, or --config.data.source=sklearn"
            )
        for path in filter(None, (config.data.path, config.data.public_path)):
            if not Path(path).exists():
                raise FileNotFoundError(f"{path}: no such file or folder; check --config.data.path")
    if not 0 < config.test_fraction < 1:
        raise ValueError(f"config.test_fraction={config.test_fraction} must be in (0, 1)")
    for name in FITS:
        for steps in grid_of(name, config):
            at_steps(name, config, steps).calibrate(config.epsilon, config.delta)


def bounds(config) -> noisy_head.HyperParameters:
    """C and G from the config, and the R that is valid for them (see `noisy_head.hyperparameters`)."""
    C, G, decay = config.response_clip, config.feature_radius, config.regularization
    inside = G / (decay + G**2) if decay >= G**2 else 1 / (2 * np.sqrt(decay))
    return noisy_head.HyperParameters(C, G, float(C * inside))


def at_steps(name: str, config, steps: int) -> Method:
    """The fit called `name` for exactly T steps."""
    hyper = bounds(config)
    decay = (2 if name == "paper" else 1) * config.regularization
    options = {
        "regularization": config.regularization,
        "step_size": config.step_fraction * 2 / (decay + hyper.feature_radius**2),
        "steps": int(steps),
        **FITS[name],
    }
    return Method(hyper, options)


def plan(config) -> dict:
    """Noise multipliers at every T."""
    return {
        f"{name}, T={steps}: noise multiplier": at_steps(name, config, steps).calibrate(
            config.epsilon, config.delta
        )[0]
        for name in FITS
        for steps in grid_of(name, config)
    }


def load(config) -> tuple[noisy_head.Prompts, noisy_head.Prompts]:
    """Training and test prompts; which documents are test documents depends on the seed alone."""
    if config.data.source == "sklearn":
        texts = newsgroups.fetch_newsgroups("train")
        public = newsgroups.fetch_newsgroups("test")
    else:
        texts = newsgroups.load_texts(config.data.path, column=config.data.column)
        public = None
        if config.data.public_path:
            public = newsgroups.load_texts(config.data.public_path, column=config.data.column)
    frequencies = newsgroups.document_frequencies(public) if public else None
    x, y = newsgroups.text_prompts(
        texts,
        frequencies,
        dim=config.dim,
        length=config.length,
        typical_tokens=config.typical_tokens,
        log_spread=config.log_spread,
        seed=config.seed,
    )
    tests = max(1, round(config.test_fraction * len(x)))
    if tests >= len(x):
        raise ValueError(
            f"{len(x)} prompts leave none to train on: add documents or lower config.length"
        )
    return noisy_head.Prompts(x[tests:], y[tests:]), noisy_head.Prompts(x[:tests], y[:tests])


def run(config, workdir: Path) -> Outcome:
    """Test risks against T, private and not, and the one-shot release."""
    train, test = load(config)
    keys = jax.random.split(
        open_keys(config, workdir, data=map(np.asarray, train)).noise, len(FITS) + 1
    )
    hyper = bounds(config)
    with jax.enable_x64(True):
        features = noisy_head.featurize(train, response_clip=hyper.response_clip)
        held_out = noisy_head.featurize(test)
        reference = noisy_head.ridge(noisy_head.featurize(train), config.regularization)

        def risks(gamma, what):
            excess = noisy_head.empirical_risk(gamma, held_out, reference=reference)
            mse = noisy_head.empirical_risk(gamma, held_out)
            return {f"{what}/excess_risk": excess, f"{what}/test_mse": mse}

        found = risks(jnp.zeros_like(reference), "zero") | risks(reference, "ridge")
        releases = {}
        for key, name in zip(keys, FITS, strict=False):
            fits = [at_steps(name, config, steps) for steps in grid_of(name, config)]
            if not fits:
                continue
            gammas = jax.jit(stopped(fits, None, config.epsilon, config.delta))(key, features)
            for fit, gamma in zip(fits, gammas, strict=True):
                steps = fit.options["steps"]
                found |= _at(risks(gamma, name), steps)
                _, releases[f"{name}, T={steps}"] = fit.calibrate(config.epsilon, config.delta)
        step_size = at_steps("noisy_head", config, 1).options["step_size"]
        iterates = noisy_head.gradient_descent(
            features,
            regularization=config.regularization,
            step_size=step_size,
            steps=max(config.steps_grid),
            trajectory=True,
        )
        for steps in config.steps_grid:
            found |= _at(risks(iterates[steps - 1], "not_private"), steps)
        one_shot = noisy_head.fit_one_shot(
            keys[-1],
            features,
            hyper,
            regularization=config.regularization,
            epsilon=config.epsilon,
            delta=config.delta,
        )
        found |= risks(one_shot.gamma, "one_shot")
        metrics = {name: float(value) for name, value in found.items()}
    metrics["train_prompts"], metrics["test_prompts"] = len(train.x), len(test.x)
    releases["one_shot"] = one_shot.guarantee
    releases = {label: spent.assuming(ASSUMPTION) for label, spent in releases.items()}
    headline = releases[f"noisy_head, T={max(config.steps_grid)}"]
    return Outcome(
        measures=measures(metrics),
        headline=headline,
        releases=releases,
        not_covered=[
            "the number of documents, and the test prompts that the risks are computed on",
            "ridge, not_private and every risk in this record: they are computed without noise, for research",
            "an author of documents in several prompts",
        ],
        notes=table(config, metrics),
    )


def _at(risks: dict, steps: int) -> dict:
    return {f"{name}/T{steps}": value for name, value in risks.items()}


def table(config, metrics: dict[str, float]) -> str:
    """Excess risk and test MSE at every T, in markdown."""
    names = (*FITS, "not_private")
    kinds = ("excess_risk", "test_mse")
    columns = [f"{name} {kind}" for name in names for kind in kinds]
    rows = [f"| T | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for steps in config.steps_grid:
        values = [
            f"{metrics.get(f'{name}/{kind}/T{steps}', math.nan):.3g}"
            for name in names
            for kind in kinds
        ]
        rows.append(f"| {steps} | {' | '.join(values)} |")
    for name in ("zero", "ridge", "one_shot"):
        rows.append(
            f"\n{name}: excess {metrics[f'{name}/excess_risk']:.3g}, "
            f"test MSE {metrics[f'{name}/test_mse']:.4g}"
        )
    return "\n".join(rows)


def figures(records, folder: Path) -> list[Path]:
    """Test risks against T."""
    return [
        path
        for record in records
        for path in noisy_head_figures.curves(
            record, folder, xlabel="steps T", ylabel="test risk", name="text"
        )
    ]
