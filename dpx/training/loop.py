"""The training loop: Poisson batches, one noisy Optax step each, checkpoints, a progress line."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

import dpx
from dpx import _storage as storage
from dpx import _validate, _watch
from dpx.clipping import sums
from dpx.training import sampling
from dpx.training.keys import Keys

_ROUNDED = (
    "sums of clipped gradients count as exact: in 32-bit floats a record moves them by a share more, which "
    "ClippedGrad.rounding bounds"
)


@dataclasses.dataclass(frozen=True)
class Privacy:
    """What makes a training run private; absent from a run that is not."""

    l2_clip_norm: float
    normalize: bool
    noise_multiplier: float
    spent: Callable[[int], float]  # ε after that many steps
    alone: dpx.PrivacyGuarantee | None = None  # of all steps, without what is paid for beside them


def train(
    loss_fn: Callable[..., jax.Array],
    params: Any,
    data: tuple[np.ndarray, ...],
    config: Any,
    *,
    keys: Keys,
    label: str,
    workdir: Path,
    privacy: Privacy | None,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
) -> Any:
    """Trains and returns the parameters.

    Each step takes a Poisson sample, sums (clipped) gradients over pieces of `microbatch_size` examples
    in one jitted loop, adds noise to the sum once, and divides by the expected batch size. A private
    run saves checkpoints in `workdir` and resumes from the last one bitwise; a run that is not private
    saves nothing.

    Args:
      loss_fn: (params, *example, key) -> scalar loss of one example; `key` is for dropout. It depends on the
        step and on the record's own index, not on its place in the sample.
      params: Initial parameters, any pytree.
      data: Arrays with one row per example; they stay on the device.
      config: `steps`, `batch_size` (expected), `microbatch_size`, `learning_rate`, `warmup` (share of the
        steps), `weight_decay`, `log_every`, `checkpoint_every` (steps).
      keys: Of noise and dropout masks, and of Poisson sampling. All three are secret: under masks that are
        known, the record that is removed is not the only one whose gradient changes.
      label: Names the run in metrics.jsonl and on the progress line.
      workdir: Holds metrics.jsonl and the checkpoints.
      privacy: None for ordinary training on the same batches.
      evaluate: Of the parameters, logged every `config.evaluate_every` steps; not covered by the guarantee.
    """
    num_examples, steps = public_size(len(data[0])), config.steps
    probability = config.batch_size / num_examples
    piece = min(config.microbatch_size, num_examples)
    noise_key, dropout_key = jax.random.split(keys.noise)
    optimizer = _optimizer(config, privacy, noise_key, label)
    step_fn = jax.jit(
        functools.partial(_step, loss_fn, optimizer, privacy, piece), donate_argnums=0
    )
    # Steps reuse the memory of the state they are given, which the caller's arrays must survive.
    state = jax.tree.map(lambda leaf: leaf.copy(), (params, optimizer.init(params)))
    # Checkpoints are written and deleted in the background, which has to end with the run, killed or not.
    with contextlib.ExitStack() as stack:
        start, checkpoints = 0, None
        if privacy is not None:
            folder = workdir / "checkpoints" / label
            checkpoints = stack.enter_context(contextlib.closing(_Checkpoints(folder)))
            start, state = checkpoints.restore(state)
        log = MetricLog(workdir / "metrics.jsonl", label, start)
        data_on_device = jax.tree.map(jnp.asarray, data)
        names = jnp.asarray(_watch.record_ids(len(data[0])))
        # Pieces beyond those of a batch are never run, so room for the largest batch to expect costs nothing.
        room = _largest_batch(num_examples, probability)
        batches = sampling.poisson_batches(
            len(data[0]),
            sampling_probability=probability,
            steps=steps,
            seed=keys.sampling,
            multiple_of=piece,
            start=start,
        )
        began = time.monotonic()
        for step, (indices, mask) in enumerate(batches, start=start):
            pieces = len(indices) // piece
            indices, mask = _pad_to(indices, room, piece), _pad_to(mask, room, piece)
            key = jax.random.fold_in(dropout_key, step)
            _watch.key_used(key, "dropout")
            state, loss = step_fn(state, (data_on_device, names), indices, mask, pieces, key)
            done = step + 1
            if done % config.log_every == 0 or done == steps:
                spent = privacy.spent(done) if privacy is not None else None
                log.write({"step": done, "loss": float(loss), "epsilon": spent})
                _progress(label, done, steps, float(loss), spent, began, done - start)
            if evaluate is not None and done % config.evaluate_every == 0:
                log.write({"step": done} | evaluate(state[0]))
            if checkpoints is not None and (done % config.checkpoint_every == 0 or done == steps):
                checkpoints.save(done, state)
    return state[0]


def _optimizer(config, privacy, noise_key, label):
    steps = config.steps
    warmup = max(1, round(config.warmup * steps))
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(config.learning_rate / warmup, config.learning_rate, warmup),
            optax.linear_schedule(config.learning_rate, 0.0, max(1, steps - warmup)),
        ],
        [warmup],
    )
    if privacy is None:
        mean = optax.scale(1 / config.batch_size)
    else:
        mean = dpx.privatize(
            l2_clip_norm=privacy.l2_clip_norm,
            noise_multiplier=privacy.noise_multiplier,
            expected_batch_size=config.batch_size,
            key=noise_key,
            label=f"gradients of {label}",
        )
    return optax.chain(mean, optax.adamw(schedule, weight_decay=config.weight_decay))


def _step(loss_fn, optimizer, privacy, piece, state, data, indices, mask, pieces, key):
    params, opt_state = state
    if privacy is None:
        gradient = functools.partial(_plain_gradient, loss_fn)
    else:
        gradient = dpx.clipped_grad(
            loss_fn, l2_clip_norm=privacy.l2_clip_norm, normalize=privacy.normalize
        )

    def add_piece(index, totals):
        rows = jax.lax.dynamic_slice_in_dim(indices, index * piece, piece)
        real = jax.lax.dynamic_slice_in_dim(mask, index * piece, piece)
        batch, names = jax.tree.map(lambda array: array[rows], data)
        # A mask belongs to a record: were it that of a slot, each record would change those after it.
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(names)
        result = gradient(params, *batch, keys, mask=real)
        grads, loss = totals
        return sums.add(grads, result.grads), loss + result.losses.sum()

    # A plain running sum rounds by more than one record's gradient once it is long.
    totals = (sums.start(params), jnp.zeros(()))
    totals, loss = jax.lax.fori_loop(0, pieces, add_piece, totals)
    grads = sums.result(totals)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    loss = loss / jnp.maximum(mask.sum(), 1)
    return (optax.apply_updates(params, updates), opt_state), loss


def _plain_gradient(loss_fn, params, *batch, mask):
    def total(params):
        losses = jax.vmap(loss_fn, (None, *(0 for _ in batch)))(params, *batch)
        losses = jnp.where(mask, losses, 0)
        return losses.sum(), losses

    (_, losses), grads = jax.value_and_grad(total, has_aux=True)(params)
    return dpx.ClippedGrads(grads, jnp.zeros_like(losses), losses)


def public_size(count: int) -> int:
    """The number of records, which every guarantee here assumes to be public."""
    return _watch.public(count, "the number of records")


def _largest_batch(num_examples: int, probability: float) -> int:
    spread = math.sqrt(num_examples * probability * (1 - probability))
    return min(num_examples, math.ceil(num_examples * probability + 6 * spread) + 1)


def _pad_to(array: np.ndarray, size: int, multiple: int) -> np.ndarray:
    size = max(len(array), math.ceil(size / multiple) * multiple)
    return np.pad(array, (0, size - len(array)))


class _Checkpoints:
    """Orbax checkpoints of a private run, without the noise key, each with a digest of its arrays.

    A run keeps its keys until it has finished, so without its checkpoints it goes through the same steps,
    with the same noise, from the start.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        with self._naming("be opened", "delete it, and the run starts again with the same noise"):
            self._manager = ocp.CheckpointManager(
                folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1)
            )

    def save(self, step: int, state) -> None:
        kept = _without_key(state)
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(kept), digest=ocp.args.JsonSave(_digest(kept))
        )
        with self._naming("be written", "make room, and repeat the command"):
            self._manager.save(step, args=arguments)

    def restore(self, state) -> tuple[int, Any]:
        step = self._manager.latest_step()
        if step is None:
            return 0, state
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, _without_key(state))
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(template), digest=ocp.args.JsonRestore()
        )
        with self._naming("be read", "delete it, and the run starts again with the same noise"):
            found = self._manager.restore(step, args=arguments)
            if found["digest"] != _digest(found["state"]):
                raise ValueError("its arrays are not those that were written")
        params, (noise, *rest) = found["state"]
        return step, (params, (state[1][0]._replace(count=noise), *rest))

    def close(self) -> None:
        # Checkpoints are written in the background: what goes wrong there is known here.
        with self._naming("be written", "make room, and repeat the command"):
            self._manager.close()

    @contextlib.contextmanager
    def _naming(self, what: str, remedy: str):
        try:
            yield
        except (
            Exception
        ) as error:  # Orbax and TensorStore raise many types for files they cannot use
            raise storage.StorageError(
                f"{self._folder} cannot {what} ({type(error).__name__}): {remedy}"
            ) from error


def _digest(state) -> dict[str, str]:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        found.update(np.ascontiguousarray(leaf).data)
    return {"sha256": found.hexdigest()}


def _without_key(state):
    params, (noise, *rest) = state
    return params, (noise.count, *rest)


class MetricLog:
    """Lines of metrics.jsonl; what a killed run wrote after its last checkpoint is dropped."""

    def __init__(self, path: Path, label: str, start: int):
        self._path, self._label = path, label
        if path.exists():
            entries = storage.read_lines(path)
            kept = (json.dumps(entry) + "\n" for entry in entries if not self._stale(entry, start))
            storage.write_text(path, "".join(kept))

    def _stale(self, entry: dict, start: int) -> bool:
        return entry.get("run") == self._label and entry.get("step", 0) > start

    def write(self, entry: dict) -> None:
        with storage.naming(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": self._label, **entry}) + "\n")


def _progress(label, done, steps, loss, spent, began, ran) -> None:
    speed = ran / max(time.monotonic() - began, 1e-9)
    epsilon = "" if spent is None else f"  ε {spent:.3f}"
    left = (steps - done) / speed
    sys.stderr.write(
        f"{label}: step {done}/{steps}  loss {loss:.4f}{epsilon}  {speed:.1f} steps/s  {left:.0f} s left\n"
    )
    sys.stderr.flush()


def save_model(workdir: Path, model: Any) -> None:
    """Saves a private model's arrays in a run's folder."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(workdir.absolute() / "model", model, force=True)


def load_model(workdir: Path, template: Any) -> Any:
    """What `save_model` saved, in the shapes and structure of `template`."""
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
    folder = workdir.absolute() / "model"
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(folder, shapes)
    except Exception as error:  # Orbax and TensorStore raise many types for files they cannot use
        raise storage.damaged(folder) from error


def check(config: Any, num_examples: int, *, name: str = "config.train") -> None:
    """Raises ValueError for a training section, named so, that cannot be used."""
    if not 0 < config.batch_size <= num_examples:
        raise ValueError(
            f"{name}.batch_size={config.batch_size} gives a sampling probability outside (0, 1] "
            f"for {num_examples} records: use at most that many"
        )
    for key in ("steps", "microbatch_size", "log_every", "checkpoint_every"):
        if config[key] < 1:
            raise ValueError(f"{name}.{key}={config[key]} must be at least 1")
    for key in ("learning_rate", "l2_clip_norm"):
        if not 0 < config[key] < math.inf:
            raise ValueError(f"{name}.{key}={config[key]} must be positive and finite")
    if not 0 <= config.warmup <= 1:
        raise ValueError(f"{name}.warmup={config.warmup} must be a share of the steps, in [0, 1]")
    _validate.check_positive(config.weight_decay, f"{name}.weight_decay", zero=True)
    if config.accountant not in ("pld", "rdp"):
        raise ValueError(f"{name}.accountant={config.accountant!r} must be 'pld' or 'rdp'")


def check_both(config: Any, num_examples: int) -> None:
    """Raises ValueError where `config.train`, or the baseline without privacy if any, cannot be used."""
    check(config.train, num_examples)
    if config.non_private.steps != 0:
        check(without_privacy(config), num_examples, name="config.non_private")


def without_privacy(config: Any) -> Any:
    """The training section of the baseline: `config.train`, changed by `config.non_private`."""
    return ConfigDict({**config.train.to_dict(), **config.non_private.to_dict()})


def warn_about_delta(delta: float, num_records: int) -> None:
    """Warns where δ allows a record to be published outright."""
    if delta > 1 / num_records:
        warnings.warn(
            f"delta={delta:g} exceeds 1/{num_records}, one over the number of records: "
            "such a guarantee permits publishing a record",
            stacklevel=2,
        )


def make_private(
    config: Any,
    epsilon: float,
    delta: float,
    num_examples: int,
    unit: str,
    assumptions: tuple[str, ...],
    *,
    beside: dpx.PrivacyGuarantee | None = None,
    beside_label: str = "prior release",
) -> tuple[Privacy, dpx.PrivacyGuarantee]:
    """Calibrates a training run to a budget.

    Args:
      config: The training section.
      epsilon, delta: The budget.
      num_examples: Number of records.
      unit: What a record is.
      assumptions: What the guarantee rests on.
      beside: A Gaussian release that is paid from the same budget.
      beside_label: What that release is.

    Returns:
      What `train` needs, and the guarantee of the run and that release together.
    """
    probability = config.batch_size / public_size(num_examples)
    settings = {"sampling_probability": probability, "accountant": config.accountant}
    event = None if beside is None else beside.event
    assumptions = (*assumptions, _ROUNDED)
    multiplier = dpx.calibrate_dpsgd(epsilon, delta, steps=config.steps, beside=event, **settings)

    def alone(steps: int) -> dpx.PrivacyGuarantee:
        return dpx.privacy.dpsgd_guarantee(
            multiplier, delta, steps=steps, unit=unit, assumptions=assumptions, **settings
        )

    def guarantee(steps: int) -> dpx.PrivacyGuarantee:
        if beside is None:
            return alone(steps)
        ledger = dpx.Ledger().spend(beside, beside_label)
        return ledger.spend(alone(steps), "DP-SGD").guarantee(delta)

    privacy = Privacy(
        l2_clip_norm=config.l2_clip_norm,
        normalize=config.normalize,
        noise_multiplier=multiplier,
        spent=lambda steps: guarantee(steps).epsilon,
        alone=alone(config.steps),
    )
    return privacy, guarantee(config.steps)


def plan(
    config: Any,
    epsilon: float,
    delta: float,
    num_examples: int,
    *,
    beside: dpx.PrivacyGuarantee | None = None,
) -> dict:
    """The privacy parameters that `train` would use."""
    unit = "record" if beside is None else beside.unit
    privacy, guarantee = make_private(config, epsilon, delta, num_examples, unit, (), beside=beside)
    return {
        "noise_multiplier": privacy.noise_multiplier,
        "sampling_probability": config.batch_size / num_examples,
        "expected_batch_size": config.batch_size,
        "steps": config.steps,
        "epsilon": guarantee.epsilon,
        "delta": delta,
        "records": num_examples,
    }
