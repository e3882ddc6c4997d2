"""How fast NoisyHead's trials are against a NumPy loop with the same arithmetic.

    python -m experiments.bench.noisy_head [--trials=100] [--num_prompts=4000]

One trial of Section 6.1's low-dimensional cell: draw N prompts, form features, solve ridge, run Algorithm 1
for five budgets, take the exact excess risks. The loop does one trial after another with the same arithmetic,
as a careful NumPy author would: float32 draws, no loop over prompts, second moments formed once, and from
them the descent of all budgets together. Then 100,000 prompts (L = 63, D = 5) are drawn, streamed into
features and fitted. Prints times and their ratio: dpx runs its trials on all cores, the loop on one.
"""

import concurrent.futures
import os
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags

from configs.noisy_head import get_config
from dpx import noisy_head
from dpx.runs import cli
from experiments.bench._steps import in_turn
from experiments.noisy_head import excess_risk as experiment
from experiments.noisy_head.methods import make_cell, make_descent

_TRIALS = flags.DEFINE_integer("trials", 100, "trials to time", lower_bound=1)
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 4000, "prompts in a trial", lower_bound=2)


def numpy_features(rng: np.random.Generator, N: int, L: int, D: int) -> tuple[np.ndarray, ...]:
    """Query (N, D), context (N, D) and target (N,) of N prompts. Blocks of prompts are no faster."""
    draws = rng.standard_normal((N, L + 2, D), dtype=np.float32).astype(np.float64)
    w, x = draws[:, 0], draws[:, 1:]
    x /= np.sqrt(np.einsum("nld,nld->nl", x, x))[..., None]
    y = (x @ w[:, :, None])[..., 0]
    context = (y[:, None, :-1] @ x[:, :-1])[:, 0] / L
    return x[:, -1], context, y[:, -1]


def numpy_trial(rng: np.random.Generator, cell, descent, multipliers: np.ndarray) -> np.ndarray:
    """Excess risks of Algorithm 1 as printed, at each noise multiplier."""
    N, L, D, regularization, _ = cell
    query, context, target = numpy_features(rng, N, L, D)

    def moments():
        design = (query[:, :, None] * context[:, None, :]).reshape(N, D * D)
        return design.T @ design, target @ design

    H, h = moments()
    reference = np.linalg.solve(H + N * regularization * np.eye(D * D), h)
    C, G, R = descent.hyper
    context *= np.minimum(1, G / np.sqrt(np.sum(query**2, 1) * np.sum(context**2, 1)))[:, None]
    target = np.clip(target, -C, C)
    H, h = moments()
    step_size = descent.step_size
    stds = multipliers[:, None] * descent.change
    gammas = np.zeros((len(multipliers), D * D))
    for _ in range(descent.steps):
        gradients = (gammas @ H - h + stds * rng.standard_normal(gammas.shape)) / N
        gammas = (1 - 2 * regularization * step_size) * gammas - step_size * gradients
        norms = np.sqrt(np.sum(gammas**2, axis=1, keepdims=True))
        gammas *= np.minimum(1, R / norms)
    return np.sum((gammas - reference) ** 2, axis=1) * (1 / L + (1 - 1 / L) / D) / D**2


def seconds(function, repeats: int = 5) -> float:
    """The smallest wall time of a few calls."""
    return in_turn({"call": function}, repeats, warm=0)["call"].min()


def main(_):
    config: Any = get_config("low_dim")
    config.methods, config.one_shot = ("paper",), False
    budgets = tuple(config.epsilons)
    cell = make_cell(config, num_prompts=_NUM_PROMPTS.value)
    descent = make_descent("paper", config, cell)
    multipliers = np.array([descent.calibrate(epsilon, config.delta)[0] for epsilon in budgets])
    trials = _TRIALS.value

    rng = np.random.default_rng(0)
    slow = np.mean([numpy_trial(rng, cell, descent, multipliers) for _ in range(trials)], axis=0)
    loop = seconds(lambda: numpy_trial(rng, cell, descent, multipliers), trials)

    began = time.perf_counter()
    cores = os.cpu_count() or 1
    program = experiment.compile_trials(config, cell, budgets, -(-trials // cores))
    compilation = time.perf_counter() - began
    batches = jax.random.split(jax.random.key(0), -(-trials // cores) * cores).reshape(cores, -1)
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        risks = np.concatenate([found["paper"] for found in pool.map(program, batches)])
        fast = seconds(lambda: list(pool.map(program, batches))) / batches.size
    print(f"NumPy loop   {loop * 1e3:8.1f} ms a trial; mean excess risks {np.round(slow, 3)}")
    found = np.round(np.mean(risks[..., 0], axis=0), 3)
    print(f"dpx          {fast * 1e3:8.1f} ms a trial; mean excess risks {found}")
    print(f"ratio        {loop / fast:8.1f} on {cores} cores; compilation {compilation:.1f} s")

    large = {"num_prompts": 100_000, "length": 63, "dim": 5}
    for attempt in ("with compilation", "again"):
        began = time.perf_counter()
        features = noisy_head.sample_features(jax.random.key(1), *large.values())
        hyper = noisy_head.hyperparameters(*large.values(), regularization=0.003)
        once = noisy_head.fit_one_shot(
            jax.random.key(2), features, hyper, regularization=0.003, epsilon=1.0, delta=1e-5
        )
        descended = noisy_head.fit(
            jax.random.key(3),
            features,
            hyper,
            regularization=0.003,
            step_size=1 / (0.003 + hyper.feature_radius**2),
            steps=100,
            epsilon=1.0,
            delta=1e-5,
        )
        jax.block_until_ready((once.gamma, descended.gamma))
        print(
            f"N = 100,000  {time.perf_counter() - began:8.1f} s {attempt}; test MSE one-shot "
            f"{noisy_head.population_risk(once.gamma, 63):.3f}, NoisyHead "
            f"{noisy_head.population_risk(descended.gamma, 63):.3f}"
        )


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
