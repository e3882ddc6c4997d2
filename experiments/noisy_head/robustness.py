"""How far one corrupted prompt moves NoisyHead and ridge (Section 6.3 of arXiv 2504.16000)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dpx import noisy_head
from dpx.runs.experiment import Comparison, Outcome, Plan
from experiments import checks
from experiments.noisy_head.figures import drawer
from experiments.noisy_head.methods import (
    SIMULATED,
    TITLES,
    check,
    check_some,
    guarantees,
    make_cell,
    make_descent,
    progress,
)
from experiments.repeated import measure


def validate(config) -> None:
    """Raises ValueError for a bad value, before anything is computed."""
    check(config)
    checks.choice(config, "where", ("context", "all", "query"))
    check_some(config, "methods", "scales", "powers")
    guarantees(config, make_cell(config, num_prompts=config.num_prompts))


def plan(config) -> Plan:
    """What each fit guarantees, and its noise multiplier."""
    cell = make_cell(config, num_prompts=config.num_prompts)
    parameters = {
        f"{name}: noise multiplier": make_descent(name, config, cell).calibrate(
            config.epsilon, config.delta
        )[0]
        for name in config.methods
    }
    return Plan(guarantees(config, cell), parameters)


def run(config, workdir: Path) -> Outcome:
    """E⟨Γ − Γ_bad, Z⟩² for ridge, by QR and by normal equations, and for each fit, at every (c, p)."""
    del workdir
    cell = make_cell(config, num_prompts=config.num_prompts)
    attacks = [(c, p) for c in config.scales for p in config.powers]
    alphas = jnp.array([c * cell.num_prompts**p for c, p in attacks])
    keys = jax.random.split(jax.random.key(config.seed), config.trials)
    progress(f"compiling {config.trials} trials of {len(attacks)} attacks")
    with jax.enable_x64(True):
        fits = {name: _fitter(name, config, cell) for name in config.methods}
        simulate = jax.jit(
            lambda keys: jax.lax.map(lambda key: _trial(key, config, cell, alphas, fits), keys)
        )
        shifts, mse = jax.tree.map(np.asarray, simulate(keys))
    measures = []
    for name, values in shifts.items():
        for index, (c, p) in enumerate(attacks):
            measures.append(measure(name, "shift", values[:, index], {"c": c, "p": p}))
    measures += [measure(name, "test_mse", values) for name, values in mse.items()]
    releases = guarantees(config, cell)
    return Outcome(
        measures=measures,
        headline=releases[config.methods[-1]],
        releases=releases,
        titles=TITLES,
        headline_row=config.methods[-1],
        comparisons=[Comparison("test_mse", ["zero"])],
        synthetic=True,
        not_covered=[SIMULATED],
        notes="shift is E⟨Γ − Γ_bad, Z⟩², by how much a fresh prompt is predicted differently after one "
        "prompt is corrupted with α = c Nᵖ; test_mse is without attack. ridge_qr and ridge_gram are the same "
        "ridge by two solvers, and not private; zero predicts zero.",
    )


def _fitter(name, config, cell):
    descent = make_descent(name, config, cell)
    multiplier, _ = descent.calibrate(config.epsilon, config.delta)
    return lambda key, features: noisy_head.noisy_descent(
        key, features, descent, noise_multiplier=multiplier
    )


def _trial(key, config, cell, alphas, fits):
    key_data, key_victim, key_good, key_bad = jax.random.split(key, 4)
    index = jax.random.randint(key_victim, (), 0, cell.num_prompts)
    clip = make_descent("paper", config, cell).hyper.response_clip  # the same under both rules
    raw, clipped = (cell.draw(key_data, response_clip=bound) for bound in (None, clip))
    # The victim's tokens again: a prompt depends on its own key alone.
    victim = noisy_head.sample_prompt(
        jax.random.split(key_data, cell.num_prompts)[index],
        cell.length,
        cell.dim,
        noise_std=cell.noise_std,
    )

    def corrupted(good, alpha, response_clip):
        attacked = noisy_head.corrupt(victim, 0, alpha=alpha, mu=config.mu, where=config.where)
        bad = noisy_head.featurize(attacked, response_clip=response_clip)
        return noisy_head.Features(
            *(rows.at[index].set(row[0]) for rows, row in zip(good, bad, strict=True))
        )

    def shift(fit, good, response_clip=None):
        """⟨Γ − Γ_bad, Z⟩² at each α, where `fit` takes features and 0 for the good, 1 for the bad ones."""
        reference = fit(good, 0)
        moved = jax.lax.map(lambda alpha: fit(corrupted(good, alpha, response_clip), 1), alphas)
        return noisy_head.population_risk(moved, cell.length, reference=reference)

    risks = {
        f"ridge_{method}": shift(
            lambda features, _, method=method: noisy_head.ridge(
                features, cell.regularization, method=method
            ),
            raw,
        )
        for method in ("qr", "gram")
    }
    mse = {
        "zero": jnp.float64(1 + cell.noise_std**2),
        "ridge": noisy_head.population_risk(
            noisy_head.ridge(raw, cell.regularization), cell.length, noise_std=cell.noise_std
        ),
    }
    for place, (name, fit) in enumerate(fits.items()):
        noise = [jax.random.fold_in(k, place) for k in (key_good, key_bad)]
        risks[name] = shift(
            lambda features, which, fit=fit, noise=noise: fit(noise[which], features), clipped, clip
        )
        mse[name] = noisy_head.population_risk(
            fit(noise[0], clipped), cell.length, noise_std=cell.noise_std
        )
    return risks, mse


figures = drawer(
    "robustness",
    {"shift": "E⟨Γ − Γ_bad, Z⟩²"},
    x="p",
    marker="c",
    dashed=("ridge_qr", "ridge_gram"),
)
