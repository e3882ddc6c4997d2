"""What it costs to cut Poisson samples off at a size: ε with the cut over ε without, at the same noise.

python -m experiments.bench.truncation
"""

import math
from typing import Any

from absl import app

import dpx
from dpx.privacy import truncation_probability

DELTA = 1e-5
# Records, expected batch size, steps and noise multiplier.
RUNS = ((10_000, 100, 1000, 1.0), (10_000, 256, 500, 1.0), (1_000_000, 1024, 10_000, 0.8))


def main(argv: list[str]) -> None:
    del argv
    for records, size, steps, noise in RUNS:
        settings: dict[str, Any] = {"sampling_probability": size / records, "steps": steps}
        plain = dpx.dpsgd_epsilon(noise, DELTA, **settings)
        print(
            f"\n{records:,} records, batches of {size} expected, {steps:,} steps: ε = {plain:.3g}"
        )
        spread = math.sqrt(size * (1 - size / records))
        for deviations in (6, 5, 4, 3, 2):
            most = math.ceil(size + deviations * spread)
            cut: dict[str, Any] = {"num_examples": records, "max_batch_size": most}
            chance = truncation_probability(
                records, sampling_probability=size / records, max_batch_size=most
            )
            ratio = dpx.dpsgd_epsilon(noise, DELTA, **settings, **cut) / plain
            print(f"  at {most} ({deviations} σ): probability {chance:.1e}, ε × {ratio:.5f}")


if __name__ == "__main__":
    app.run(main)
