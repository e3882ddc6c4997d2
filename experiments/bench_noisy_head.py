"""How fast NoisyHead's trials are against a NumPy loop with the same arithmetic, and how large they get.

    python -m experiments.bench_noisy_head [--trials=20] [--num_prompts=4000]

One trial of Section 6.1's low-dimensional cell: draw N prompts, form features, solve ridge, run Algorithm 1
for five budgets, take the exact excess risks. The loop does one trial and one budget after another, in the
factored form of the gradient that a careful NumPy author would write. Then 100,000 prompts (L = 63, D = 5)
are drawn, streamed into features and fitted. Prints times, the ratio, and XLA's temporary memory.
"""

import time
from typing import Any

import jax
import numpy as np
from absl import app, flags

from configs.noisy_head import get_config
from dpx import noisy_head
from experiments import noisy_head as experiment

_TRIALS = flags.DEFINE_integer("trials", 20, "trials to time")
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 4000, "prompts in a trial")


def numpy_trial(rng: np.random.Generator, cell, method, multipliers) -> list[float]:
    """Excess risks of Algorithm 1 as printed, at each noise multiplier."""
    N, L, D, regularization, _ = cell
    x = rng.standard_normal((N, L + 1, D))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    w = rng.standard_normal((N, D))
    y = np.einsum("nld,nd->nl", x, w)
    query, target = x[:, -1], y[:, -1]
    context = np.einsum("nl,nld->nd", y[:, :-1], x[:, :-1]) / L
    design = (query[:, :, None] * context[:, None, :]).reshape(N, -1)
    gram = design.T @ design + N * regularization * np.eye(D * D)
    reference = np.linalg.solve(gram, design.T @ target).reshape(D, D)
    C, G, R = method.hyper
    context = context * np.minimum(1, G / np.linalg.norm(context, axis=1))[:, None]
    target = np.clip(target, -C, C)
    step_size, steps = method.options["step_size"], method.options["steps"]
    std = noisy_head.gradient_sensitivity(method.hyper, "paper")
    power = 1 / L + (1 - 1 / L) / D
    risks = []
    for multiplier in multipliers:
        gamma = np.zeros((D, D))
        for _ in range(steps):
            residual = np.sum((query @ gamma) * context, axis=1) - target
            gradient = (query * residual[:, None]).T @ context
            gradient = (gradient + multiplier * std * rng.standard_normal((D, D))) / N
            gamma = (1 - 2 * regularization * step_size) * gamma - step_size * gradient
            gamma *= min(1, R / np.linalg.norm(gamma))
        risks.append(np.sum((gamma - reference) ** 2) * power / D**2)
    return risks


def main(_):
    config: Any = get_config("low_dim")
    config.methods, config.trials, config.one_shot_trials = ("paper",), _TRIALS.value, 0
    budgets = tuple(config.epsilons)
    cell = experiment.make_cell(config, num_prompts=_NUM_PROMPTS.value)
    method = experiment.make_method("paper", config, cell)
    multipliers = [method.calibrate(epsilon, config.delta)[0] for epsilon in budgets]

    rng = np.random.default_rng(0)
    numpy_trial(rng, cell, method, multipliers[:1])
    trials = max(2, _TRIALS.value // 5)
    began = time.perf_counter()
    slow = np.mean([numpy_trial(rng, cell, method, multipliers) for _ in range(trials)], axis=0)
    loop = (time.perf_counter() - began) / trials

    keys = jax.random.split(jax.random.key(0), _TRIALS.value)
    with jax.enable_x64(True):
        function = experiment.trials_function(config, cell, budgets, config.methods, _TRIALS.value)
        began = time.perf_counter()
        compiled = function.lower(keys).compile()
        compile_time = time.perf_counter() - began
        jax.block_until_ready(compiled(keys))
        began = time.perf_counter()
        risks = jax.block_until_ready(compiled(keys))
        fast = (time.perf_counter() - began) / _TRIALS.value
        analysis = compiled.memory_analysis()
        assert analysis is not None
        memory = analysis.temp_size_in_bytes / 2**20
    print(f"NumPy loop   {loop * 1e3:8.1f} ms a trial; mean excess risks {np.round(slow, 3)}")
    print(
        f"dpx          {fast * 1e3:8.1f} ms a trial; mean excess risks "
        f"{np.round(np.mean(risks['paper'][..., 0], axis=0), 3)}"
    )
    print(
        f"ratio        {loop / fast:8.1f}; compilation {compile_time:.1f} s, temporaries {memory:.0f} MiB"
    )

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
    app.run(main)
