"""Canaries with one parameter each: many fit into a training, so that one run bounds ε from below."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx._validate import check_integer
from dpx.audit.canaries import Training

# The norm of a canary's gradient before clipping, in clipping norms; so large that `normalize` keeps it.
_MAGNITUDE = 1e4


class Dirac(NamedTuple):
    """A training problem with gradient canaries.

    Attributes:
      loss_fn: (params, marker, *example) -> loss. For marker 0 it is the loss of the model. For marker
        ±(i + 1) it is the loss of canary i, whose gradient is ∓ a large number in entry i of
        params["canaries"] and 0 elsewhere.
      params: {"model": the model's parameters, "canaries": (canaries,) zeros}.
      data: (markers, *data) of the model's records, followed by those of the canaries that are included.
      included: (canaries,) bool, which canaries are in the data; each is decided by a fair coin.
    """

    loss_fn: Callable[..., jax.Array]
    params: dict
    data: tuple
    included: np.ndarray


def dirac(
    loss_fn: Callable[..., jax.Array], params: Any, data: tuple, *, canaries: int, seed: int
) -> Dirac:
    """Adds gradient canaries to a training problem, each with a parameter entry of its own.

    A gradient step on a canary *raises* its entry, so that the entries of the parameters, or of −(noisy
    mean), are scores. Clipped at C, a canary adds exactly C at its entry, and other records add nothing
    there.

    Args:
      loss_fn: (params, *example) -> scalar. Arguments after those of the data, such as a key, are passed on.
      params: The initial parameters of the model.
      data: The records, arrays with a leading axis of N ≥ 1.
      canaries: The number of canaries; a coin decides for each whether it is in the data.
      seed: The seed of the coins.
    """
    canaries = check_integer(canaries, "canaries")
    coins = np.random.default_rng(seed).random(canaries) < 0.5
    chosen = np.flatnonzero(coins)
    markers = np.concatenate([np.zeros(len(jax.tree.leaves(data)[0]), np.int32), 1 + chosen])
    # A canary's row needs a record for the model, whose loss is not used.
    filled = jax.tree.map(
        lambda rows: np.concatenate([rows, np.repeat(rows[:1], len(chosen), axis=0)]), data
    )

    def with_canaries(params, marker, *example):
        entry = params["canaries"][jnp.maximum(jnp.abs(marker) - 1, 0)]
        ours = -_MAGNITUDE * jnp.sign(marker) * entry
        return jnp.where(marker == 0, loss_fn(params["model"], *example), ours)

    start = {"model": params, "canaries": jnp.zeros(canaries)}
    return Dirac(with_canaries, start, (markers.astype(np.int32), *filled), coins)


def one_run(training: Training, problem: Dirac, *, seed: int) -> np.ndarray:
    """Trains once on a problem with canaries and scores each canary from the noisy steps.

    Args:
      training: The training that is audited; its `loss_fn` is that of the problem.
      problem: What `dirac` returned.
      seed: The seed of noise and sampling.

    Returns:
      (canaries,) log-likelihood ratios of "in the data" against "not in the data", under the claim.
    """
    sampling, noise = np.random.SeedSequence(seed).spawn(2)
    data = jax.tree.map(jnp.asarray, problem.data)
    indices, mask = training.batches(len(data[0]), sampling)
    key = jax.random.key(noise.generate_state(1)[0])
    run = jax.jit(
        lambda indices, mask: training.run(
            problem.params, data, indices, mask, key, lambda _, mean: mean["canaries"]
        )[1]
    )
    sums = -np.asarray(run(indices, mask)) * training.expected_batch_size / training.l2_clip_norm
    return training.log_likelihood_ratio(sums[None])[0]
