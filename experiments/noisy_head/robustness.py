"""How far one corrupted prompt moves NoisyHead and ridge (Section 6.3 of arXiv 2504.16000)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dpx import noisy_head
from dpx.launch.experiment import Outcome, measures
from experiments.noisy_head import figures as noisy_head_figures
from experiments.noisy_head.excess_risk import check, make_cell, make_method


def validate(config) -> None:
    """Raises ValueError for a bad value, before anything is computed."""
    check(config)
    if config.where not in ("context", "all", "query"):
        raise ValueError(f"config.where={config.where!r}: use 'context', 'all' or 'query'")
    for name in ("methods", "scales", "powers"):
        if not config[name]:
            raise ValueError(f"config.{name}=() leaves nothing to run: name at least one")
    for name in config.methods:
        method = make_method(name, config, make_cell(config, num_prompts=config.num_prompts))
        method.calibrate(config.epsilon, config.delta)


def plan(config) -> dict:
    """Noise multipliers."""
    cell = make_cell(config, num_prompts=config.num_prompts)
    return {
        f"{name}: noise multiplier": make_method(name, config, cell).calibrate(
            config.epsilon, config.delta
        )[0]
        for name in config.methods
    }


def run(config, workdir: Path) -> Outcome:
    """E⟨Γ − Γ_bad, Z⟩² for ridge, by QR and by normal equations, and for each fit, at every (c, p)."""
    del workdir
    cell = make_cell(config, num_prompts=config.num_prompts)
    attacks = [(c, p) for c in config.scales for p in config.powers]
    alphas = jnp.array([c * cell.num_prompts**p for c, p in attacks])
    keys = jax.random.split(jax.random.key(config.seed), config.trials)
    with jax.enable_x64(True):
        fits = {name: _fitter(name, config, cell) for name in config.methods}
        simulate = jax.jit(
            lambda keys: jax.lax.map(lambda key: _trial(key, config, cell, alphas, fits), keys)
        )
        risks = jax.tree.map(lambda r: np.mean(r, axis=0), simulate(keys))
    metrics = {
        f"{name}/c{c:g}/p{p:g}": float(values[index])
        for name, values in risks.items()
        if np.ndim(values) == 1
        for index, (c, p) in enumerate(attacks)
    }
    metrics |= {f"{name}/test_mse": float(mse) for name, mse in risks["test_mse"].items()}
    method = make_method(config.methods[-1], config, cell)
    _, guarantee = method.calibrate(config.epsilon, config.delta)
    return Outcome(
        measures=measures(metrics),
        headline=guarantee,
        releases={config.methods[-1]: guarantee},
        synthetic=True,
        not_covered=["the prompts are simulated: the guarantee is what the method would give"],
        notes=table(config, attacks, metrics),
    )


def _fitter(name, config, cell):
    method = make_method(name, config, cell)
    multiplier, _ = method.calibrate(config.epsilon, config.delta)
    options = {key: value for key, value in method.options.items() if key != "accounting"}
    return lambda key, features: noisy_head.noisy_descent(
        key, features, method.hyper, noise_multiplier=multiplier, **options
    )


def _trial(key, config, cell, alphas, fits):
    key_data, key_victim, key_good, key_bad = jax.random.split(key, 4)
    sizes = (cell.num_prompts, cell.length, cell.dim)
    index = jax.random.randint(key_victim, (), 0, cell.num_prompts)
    clip = make_method("paper", config, cell).hyper.response_clip  # the same under both rules
    raw, clipped = (
        noisy_head.sample_features(
            key_data, *sizes, noise_std=cell.noise_std, response_clip=response_clip
        )
        for response_clip in (None, clip)
    )
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
    return {**risks, "test_mse": mse}


def table(config, attacks, metrics: dict[str, float]) -> str:
    """Risk of the shift at every (c, p), and test MSE without attack, in markdown."""
    names = ["ridge_qr", "ridge_gram", *config.methods]
    rows = [f"| c | p | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for c, p in attacks:
        values = [f"{metrics[f'{name}/c{c:g}/p{p:g}']:.3g}" for name in names]
        rows.append(f"| {c:g} | {p:g} | {' | '.join(values)} |")
    mse = [
        f"{name} {metrics[f'{name}/test_mse']:.4g}" for name in ("zero", "ridge", *config.methods)
    ]
    return "\n".join([*rows, f"\ntest MSE without attack: {', '.join(mse)}"])


def figures(records, folder: Path) -> list[Path]:
    """Risk of the shift against p."""
    return [
        path
        for record in records
        for path in noisy_head_figures.curves(
            record, folder, xlabel="p, α = c Nᵖ", ylabel="E⟨Γ − Γ_bad, Z⟩²", name="robustness"
        )
    ]
