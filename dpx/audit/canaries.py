"""Runs of DP-SGD with canaries, whose scores the bounds of `dpx.audit` turn into a lower bound on ε.

A canary is a record that is made to be detected. A *gradient* (Dirac) canary adds the clipping norm along a
coordinate that no other record uses, which is the worst case of the analysis. An *input* canary is an
ordinary record. A *white-box* auditor sees every noisy step; an auditor of the *final model* sees the last
parameters only.

    what is run     what the auditor sees          the bound
    many_runs       white box or final model       curve_lower_bound, epsilon_lower_bound, step_lower_bound
    one_run         white box                      one_run_lower_bound
    dirac           whatever a trainer returns     one_run_lower_bound

`Training` consists of the functions that dpx trains with: `clipped_grad`, `privatize` and a sampling. Each of
them can be replaced, to plant a fault. To audit a whole trainer, train it on the problem that `dirac`
returns, and score each canary by its entry of the parameters.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from scipy.special import logsumexp

from dpx._validate import check_integer, check_number
from dpx.audit.curves import SampledGaussian
from dpx.clipping import clipped_grad
from dpx.privacy.allocation import epoch
from dpx.training.privatize import privatize
from dpx.training.sampling import Allocation, Poisson, Sampling

_LEARNED = 0.1  # the share of the runs without the canary from which the joint statistic is learned
_TOGETHER = 4096  # runs at a time, to bound memory


@dataclasses.dataclass(frozen=True)
class Training:
    """The DP-SGD that is audited.

    Attributes:
      loss_fn: (params, *example) -> scalar loss of one example.
      l2_clip_norm: The clipping norm C.
      noise_multiplier: The standard deviation of the noise over C, as it is claimed.
      sampling_probability: The probability with which each record is in the batch of a step.
      steps: The number of steps.
      expected_batch_size: What noisy sums are divided by; it is public.
      learning_rate: The step size of plain gradient descent on the noisy means.
      microbatch_size: Batches are padded to a multiple of this and clipped so many examples at a time.
      clipped_grad, privatize: The functions that run, with the signatures of dpx.
      sampling: How batches are drawn; its name is that of the claim.
    """

    loss_fn: Callable[..., jax.Array]
    l2_clip_norm: float
    noise_multiplier: float
    sampling_probability: float
    steps: int
    expected_batch_size: float
    learning_rate: float = 0.1
    microbatch_size: int = 1
    clipped_grad: Callable = clipped_grad
    privatize: Callable = privatize
    sampling: Sampling = dataclasses.field(default_factory=Poisson)

    def __post_init__(self):
        for name in ("l2_clip_norm", "noise_multiplier", "expected_batch_size"):
            value = check_number(getattr(self, name), name)
            if not 0 < value < np.inf:
                raise ValueError(
                    f"{name}={value} must be positive and finite: use that of the claim"
                )
        check_integer(self.microbatch_size, "microbatch_size")
        SampledGaussian(self.sampling_probability, self.steps)  # checks both

    @property
    def model(self) -> SampledGaussian:
        """The trade-off curves of this training, for any noise multiplier."""
        return SampledGaussian(self.sampling_probability, self.steps, self.sampling.name)

    def batches(
        self, num_examples: int, seed: np.random.SeedSequence
    ) -> tuple[np.ndarray, np.ndarray]:
        """The indices and the mask of the batches of all steps, (steps, n) each."""
        drawn = list(
            self.sampling.batches(
                num_examples,
                sampling_probability=self.sampling_probability,
                steps=self.steps,
                seed=seed,
                multiple_of=self.microbatch_size,
            )
        )
        shape = (self.steps, max(len(rows) for rows, _ in drawn))
        indices, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for step, (rows, real) in enumerate(drawn):
            indices[step, : len(rows)], mask[step, : len(rows)] = rows, real
        return indices, mask

    def run(self, params, data, indices, mask, key, observe: Callable) -> tuple[Any, Any]:
        """Trains on the given batches and keeps `observe(params, noisy_mean)` of every step.

        Returns:
          The final parameters, and the observations with a leading axis of steps.
        """
        gradient = self.clipped_grad(
            self.loss_fn, l2_clip_norm=self.l2_clip_norm, microbatch_size=self.microbatch_size
        )
        noise = self.privatize(
            l2_clip_norm=self.l2_clip_norm,
            noise_multiplier=self.noise_multiplier,
            expected_batch_size=self.expected_batch_size,
            key=key,
        )

        def step(state, batch):
            params, noise_state = state
            rows, real = batch
            examples = jax.tree.map(lambda array: array[rows], data)
            sums = gradient(params, *examples, mask=real).grads
            mean, noise_state = noise.update(sums, noise_state, params)
            updates = jax.tree.map(lambda leaf: -self.learning_rate * leaf, mean)
            return (optax.apply_updates(params, updates), noise_state), observe(params, mean)

        (params, _), seen = jax.lax.scan(step, (params, noise.init(params)), (indices, mask))
        return params, seen

    def log_likelihood_ratio(self, projections: np.ndarray) -> np.ndarray:
        """The log-likelihood ratio of a run with the canary against one without, if the claim is true.

        Args:
          projections: Noisy sums along the canary's direction, in clipping norms; axis 1 holds the steps.

        Returns:
          The log-ratio of all steps together, without axis 1.
        """
        q = self.sampling_probability
        step = (np.asarray(projections, np.float64) - 0.5) / self.noise_multiplier**2
        if self.sampling.name == Allocation.name:
            return self._of_epochs(step)
        if q < 1:
            step = np.logaddexp(np.log1p(-q), np.log(q) + step)
        return step.sum(axis=1)

    def _of_epochs(self, step: np.ndarray) -> np.ndarray:
        """The same for random allocation, where the canary is in one step of each epoch, taken or not."""
        total, at = np.zeros((len(step), *step.shape[2:])), 0
        while at < self.steps:
            _, begin, length = epoch(at, self.sampling_probability)
            taken = step[:, at : begin + length]
            ratio = logsumexp(taken, axis=1) - np.log(length)
            if taken.shape[1] < length:
                ratio = np.logaddexp(ratio, np.log1p(-taken.shape[1] / length))
            total, at = total + ratio, begin + length
        return total


class Runs(NamedTuple):
    """Many runs with the canary ("inside") and as many without it ("outside").

    Attributes:
      inside, outside: (runs, steps) projections, in clipping norms. A projection is the component of a step's
        noisy sum along the canary's gradient, minus what the other records are expected to add there.
      sampled: (runs, steps) bool, whether the canary was in the batch, for the runs inside.
      final_inside, final_outside: (runs,), minus the loss of the canary under the final parameters.
    """

    inside: np.ndarray
    outside: np.ndarray
    sampled: np.ndarray
    final_inside: np.ndarray
    final_outside: np.ndarray

    def statistics(self, training: Training) -> tuple[np.ndarray, np.ndarray]:
        """Two white-box statistics for `curve_lower_bound`: (runs, 2) inside, and (runs, 2) outside.

        The first is the log-likelihood ratio of the claimed mechanism, which is the best statistic if steps
        have independent noise. The second is a joint statistic: the Mahalanobis norm of the projections, by
        their covariance without the canary. If two steps share noise, some direction has no noise, and the
        canary stands out there. The covariance is learned from a tenth of the runs outside, which are left
        out of the result.

        Raises:
          ValueError: if a tenth of the runs are too few for a covariance of all steps.
        """
        learned, steps = int(_LEARNED * len(self.outside)), self.outside.shape[1]
        if learned <= steps:
            raise ValueError(
                f"outside has {len(self.outside)} runs, a tenth of which must be more than {steps} steps: "
                f"use at least {math.ceil((steps + 1) / _LEARNED)}"
            )
        covariance = np.atleast_2d(np.cov(self.outside[:learned], rowvar=False))
        values, vectors = np.linalg.eigh(covariance)
        metric = vectors / np.sqrt(np.maximum(values, 1e-12 * max(values.max(), 1e-12)))
        center = self.outside[:learned].mean(axis=0)
        inside, outside = (
            np.stack(
                [training.log_likelihood_ratio(x), (((x - center) @ metric) ** 2).sum(axis=1)],
                axis=1,
            )
            for x in (self.inside, self.outside[learned:])
        )
        return inside, outside


def many_runs(
    training: Training, params: Any, data: tuple, canary: tuple, *, runs: int, seed: int
) -> Runs:
    """Trains `runs` times on the data with the canary and `runs` times without.

    The runs are independent of each other, in noise and in sampling.

    Args:
      training: The training that is audited. Its `microbatch_size` is replaced by the number of records.
      params: Initial parameters.
      data: The other records, arrays with a leading axis of N ≥ 1.
      canary: One record, arrays without that axis.
      runs: The number of runs of each kind, at least 10.
      seed: The seed of all noise and sampling.
    """
    runs, count = check_integer(runs, "runs", 10), len(jax.tree.leaves(data)[0])
    training = dataclasses.replace(training, microbatch_size=count + 1)
    # Runs without the canary never draw its row, which is the last, so that both kinds share one program.
    records = jax.tree.map(
        lambda rows, row: jnp.concatenate([jnp.asarray(rows), jnp.asarray(row, rows.dtype)[None]]),
        data,
        canary,
    )

    def side(size, stream):
        sampling, noise = np.random.SeedSequence([seed, stream]).spawn(2)
        batches = [training.batches(size, child) for child in sampling.spawn(runs)]
        indices, mask = (np.stack(part) for part in zip(*batches, strict=True))
        keys = jax.random.split(jax.random.key(noise.generate_state(1)[0]), runs)
        parts = [
            _run_all(training, params, records, indices[rows], mask[rows], keys[rows])
            for rows in (slice(at, at + _TOGETHER) for at in range(0, runs, _TOGETHER))
        ]
        seen, final = (np.concatenate(part) for part in zip(*parts, strict=True))
        return seen, final, ((indices == count) & mask).any(axis=2)

    inside, final_inside, sampled = side(count + 1, 0)
    outside, final_outside, _ = side(count, 1)
    return Runs(inside, outside, sampled, final_inside, final_outside)


@functools.partial(jax.jit, static_argnums=0)
def _run_all(training: Training, params, records, indices, mask, keys):
    """The projections and the scores of all runs. The canary is the last record."""

    def gradients(params):
        # The auditor computes gradients by plain JAX, so that a planted fault cannot change them.
        one = jax.vmap(jax.grad(training.loss_fn), (None, *(0 for _ in records)))
        flat = jax.vmap(lambda tree: ravel_pytree(tree)[0])(one(params, *records))
        return flat / jnp.linalg.norm(flat, axis=1, keepdims=True), flat

    def project(params, mean):
        directions, flat = gradients(params)
        clipped = jnp.where(
            jnp.linalg.norm(flat, axis=1, keepdims=True) > training.l2_clip_norm,
            training.l2_clip_norm * directions,
            flat,
        )
        others = training.sampling_probability * clipped[:-1].sum(axis=0)
        noisy = training.expected_batch_size * ravel_pytree(mean)[0]
        return (noisy - others) @ directions[-1] / training.l2_clip_norm

    def run(indices, mask, key):
        final, seen = training.run(params, records, indices, mask, key, project)
        return seen, -training.loss_fn(final, *(leaf[-1] for leaf in records))

    return jax.vmap(run)(indices, mask, keys)
