"""How the time of a private step grows with its shape, and what it is spent on.

    python -m experiments.bench.scaling

A tied transformer with logits at all positions, 2 blocks. First, one of batch size B, length L, width D and
number of items M is doubled three times while the others stay. The ordinary and the private step are timed in
turn, and a power of the size is fitted through the last three times. Beside it stands the power of the number
of operations, from XLA's cost analysis. Second, at the recommender's shape, the parts of a step are timed by
themselves: the forward pass, the backward pass, clipping, noise, the optimizer, and the sampling of records.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import dpx
from dpx.training.layout import Layout
from experiments.bench._steps import CLIP, clipped_sum, mean_gradient, medians
from experiments.bench.shapes import Shape, build

BASE = {"B": 8, "L": 32, "D": 64, "M": 2048}
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed calls of every step.", lower_bound=3)


def problem(size: dict[str, int]) -> tuple[Callable, Any, tuple]:
    """The loss of one example, parameters and a batch."""
    B, L, D, M = (size[axis] for axis in "BLDM")
    loss, params, batch_of = build(Shape(B, D, M, L, heads=max(1, D // 64)))
    return loss, params, batch_of(B)


def power(values: list[float]) -> float:
    """The exponent with which values grow as a size doubles, from the last three of them."""
    return float(np.polyfit(np.arange(3), np.log2(values[-3:]), 1)[0])


def growth() -> None:
    """Times against each size, and their exponents."""
    print(f"base: {BASE}")
    print("| size | private ms | private over ordinary | exponent | ordinary's | of operations |")
    print("|---|---|---|---|---|---|")
    for axis, start in BASE.items():
        sizes = [start * 2**i for i in range(4)]
        spent: dict[str, list[float]] = {"ordinary": [], "private": []}
        operations = []
        for size in sizes:
            loss, params, batch = problem(BASE | {axis: size})
            lowered = {
                "ordinary": jax.jit(mean_gradient(loss)).lower(params, *batch),
                "private": jax.jit(clipped_sum(loss)).lower(params, *batch),
            }
            # XLA counts what is in the loop over microbatches once.
            whole = jax.jit(clipped_sum(loss, microbatch_size=len(batch[0])))
            counted: Any = whole.lower(params, *batch).cost_analysis()
            operations.append(counted["flops"])
            steps = {
                name: partial(each.compile(), params, *batch) for name, each in lowered.items()
            }
            for name, seconds in medians(steps, _REPEATS.value).items():
                spent[name].append(seconds)
        pairs = zip(spent["private"], spent["ordinary"], strict=True)
        print(
            f"| {axis} = {', '.join(map(str, sizes))} "
            f"| {', '.join(f'{1e3 * t:.1f}' for t in spent['private'])} "
            f"| {', '.join(f'{a / b:.2f}' for a, b in pairs)} "
            f"| {power(spent['private']):.2f} | {power(spent['ordinary']):.2f} | {power(operations):.2f} |",
            flush=True,
        )


def parts() -> None:
    """Where the time of one step goes."""
    loss, params, batch = problem({"B": 64, "L": 50, "D": 64, "M": 3416})
    adam = optax.adam(1e-3)
    noisy = dpx.privatize(
        l2_clip_norm=CLIP, noise_multiplier=1.0, expected_batch_size=64, key=jax.random.key(0)
    )
    state, opt_state = noisy.init(params), adam.init(params)
    users = 30_000
    layout = Layout(None, users)
    samples = dpx.poisson_batches(
        users, sampling_probability=64 / users, steps=10**6, seed=0, multiple_of=1
    )
    data = tuple(jnp.tile(array[:1], (users, 1)) for array in batch)
    take = jax.jit(lambda data, places: [array[places] for array in data])

    def sample() -> Any:
        indices, mask = next(samples)
        places, _, _ = layout.batch(indices[mask], 128, 128)
        return take(data, places)

    def forward(params: Any, *batch: jax.Array) -> jax.Array:
        return jax.vmap(partial(loss, params))(*batch).mean()

    seconds = medians(
        {
            "forward": partial(jax.jit(forward), params, *batch),
            "gradient": partial(jax.jit(mean_gradient(loss)), params, *batch),
            # As the passes are, of all examples at once.
            "clipped": partial(jax.jit(clipped_sum(loss, microbatch_size=64)), params, *batch),
            "noise": partial(jax.jit(noisy.update), params, state),
            "optimizer": partial(jax.jit(adam.update), params, opt_state, params),
            "input": sample,
        },
        3 * _REPEATS.value,
    )
    spent = {
        "forward pass": seconds["forward"],
        "backward pass": seconds["gradient"] - seconds["forward"],
        "clipping": seconds["clipped"] - seconds["gradient"],
        "noise": seconds["noise"],
        "optimizer": seconds["optimizer"],
        "input": seconds["input"],
    }
    total = sum(spent.values())
    print("\n| part of a step, M = 3,416, all positions | ms | share |\n|---|---|---|")
    for name, each in spent.items():
        print(f"| {name} | {1e3 * each:.2f} | {100 * each / total:.1f} % |")


def main(argv: list[str]) -> None:
    del argv
    growth()
    parts()


if __name__ == "__main__":
    app.run(main)
