"""Adam with what is varied in `experiments.bench.optimizers`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from dpx.training import planning


class Setting(NamedTuple):
    """The numbers of a kind of Adam.

    Attributes:
      rate: The learning rate at its start; where it is found, a factor of what is found.
      variance: What is subtracted from the second moment.
      floor: What is left of it at least.
      decay: Of the weights.
    """

    rate: Any
    variance: Any = 0.0
    floor: Any = 0.0
    decay: Any = 0.0


def adam(setting: Setting) -> optax.GradientTransformation:
    """Adam, for one array of parameters, with the numbers of a setting but its rate."""

    def init(params: Any) -> Any:
        return 0.0, 0 * params, 0 * params  # steps, and the sums of both moments

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count, mean = state[0] + 1, 0.9 * state[1] + 0.1 * updates
        square = 0.999 * state[2] + 0.001 * updates**2
        second = square / (1 - 0.999**count) - setting.variance
        length = jnp.sqrt(jnp.maximum(second, setting.floor)) + 1e-8
        moved = mean / (1 - 0.9**count) / length + setting.decay * params
        return moved, (count, mean, square)

    return optax.GradientTransformation(init, update)


def falling(steps: int, setting: Setting) -> optax.GradientTransformation:
    """Its rate falls to zero over all steps."""
    schedule = optax.linear_schedule(setting.rate, 0.0, steps)
    return optax.chain(adam(setting), optax.scale_by_learning_rate(schedule))


def untuned(steps: int, setting: Setting) -> optax.GradientTransformation:
    """Its rate is found as `planning.untuned` finds it, which this is for a setting of zeros."""
    return optax.contrib.mechanize(falling(steps, setting), s_init=planning.FIRST_BET)
