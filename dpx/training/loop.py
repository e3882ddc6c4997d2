"""The training loop: random batches, one noisy Optax step each, checkpoints, a progress line.

`dpx.training.fit` is what users call. `train` is for callers that calibrate by themselves, because the
training shares a budget with a release that it starts from, or is not private and only a comparison.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpx import _watch
from dpx._validate import check_integer
from dpx.clipping import ClippedGrads, clipped_grad, meshes, reports
from dpx.clipping.losses import record_keys
from dpx.clipping.rounding import Sum
from dpx.noise.stream import Stream
from dpx.training import adaptive, correlated, precision, trackers
from dpx.training import users as people
from dpx.training.arguments import check_flag
from dpx.training.calibration import Privacy, check_priced, public_size
from dpx.training.checkpoints import Checkpoints
from dpx.training.keys import CannotResumeError, TrainingKeys
from dpx.training.layout import Layout
from dpx.training.log import MetricLog, Monitoring, Progress, Record, evaluated
from dpx.training.privatize import privatize
from dpx.training.sampling import Poisson, largest_sample
from dpx.training.streaming import bits_of_steps


@dataclasses.dataclass(frozen=True)
class Computation:
    """How the gradients of a batch are computed.

    Attributes:
      compute_dtype, microbatch_size, record_key, strict: As in `dpx.training.fit`.
        Frozen arrays are cast too.
      users: Whose each record is. A step then samples users: batch size, `microbatch_size` and the layout
        count users, and the loss of an example is the mean over the records that are drawn of one user.
      weight_fn: (*example) -> weight of one example in the mean loss that is reported, and in nothing else;
        None for equal weights.

    Raises:
      ValueError: for a value that cannot be used.
    """

    compute_dtype: Any = None
    microbatch_size: int | None = None
    record_key: bool = False
    users: people.Users | None = None
    strict: bool = False
    weight_fn: Callable[..., jax.Array] | None = None

    def __post_init__(self):
        size = self.microbatch_size
        checked = {
            "compute_dtype": precision.check(self.compute_dtype),
            "microbatch_size": None if size is None else check_integer(size, "microbatch_size"),
            "record_key": check_flag(self.record_key, "record_key"),
            "strict": check_flag(self.strict, "strict"),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def train(
    loss_fn: Callable[..., jax.Array],
    params: Any,
    data: tuple,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: float,
    steps: int,
    keys: TrainingKeys,
    privacy: Privacy | None,
    monitoring: Monitoring,
    computation: Computation = Computation(),
    frozen: Any = None,
    layout: Layout | None = None,
    finished: bool = False,
) -> tuple[Any, list[Record]]:
    """Trains, and returns the parameters and the history.

    Each step takes a random batch, sums (clipped) gradients over pieces of it in one jitted loop, adds noise
    to the sum once, and divides by the expected batch size. A private run saves checkpoints and resumes from
    the last one bitwise. A run that is not private saves nothing.

    Args:
      loss_fn: (params, *example) -> scalar loss of one example; with `frozen` (params, frozen, *example), and
        with `computation.record_key` a key comes last.
      params: The initial parameters, a tree of floating-point arrays.
      data: Trees of arrays with one row per example; they stay on the device.
      optimizer: An optimizer, which is given the noisy mean gradients.
      batch_size: The expected batch size.
      steps: The number of steps.
      keys: The keys of this training alone. All three are secret: were dropout masks known, a removed record
        would not be the only one whose gradient changes.
      privacy: What makes the training private; None for ordinary training on the same batches.
      monitoring: What the training tells, and where it keeps its checkpoints.
      computation: How gradients are computed.
      frozen: A tree of arrays that stay as they are. Arrays that the loss closes over instead are compiled
        into the program.
      layout: The layout of these records on a mesh of devices; None for one device.
      finished: Whether the training has finished and its keys are gone. Its result is then read, and no step
        is taken.

    Raises:
      CannotResumeError: if the result of a finished training is gone.
      ValueError: where `privacy` was calibrated for other records, steps or batches.
    """
    label, workdir, users = monitoring.label, monitoring.workdir, computation.users
    loss_fn = precision.computed_in(computation.compute_dtype, loss_fn)
    own = len(jax.tree.leaves(data)[0] if users is None else users)
    layout = layout or Layout(None, own)
    num_examples = layout.rows if privacy is None else public_size(layout.rows)
    bands = 1 if privacy is None else len(privacy.coefficients)
    sampling = Poisson() if privacy is None else privacy.sampling
    probability = bands * batch_size / num_examples
    check_priced(privacy, probability, steps, num_examples)
    # Empty pieces are never run, so room for the largest batch to expect costs nothing.
    block = num_examples if layout.shards == 1 else layout.block
    members = largest_sample(block, 1 / bands)  # of the group that a step samples from
    room = sampling.room(members, probability)
    size = computation.microbatch_size
    piece = min(math.ceil(size / layout.shards) if size else room, block)
    computation = dataclasses.replace(computation, microbatch_size=piece)
    follow = []
    if privacy is not None and privacy.count_ratio is not None:
        follow = [adaptive.follow(privacy.l2_clip_norm, privacy.count_ratio)]
    noisy = optax.chain(_mean(privacy, batch_size, keys.noise, label), *follow, optimizer)
    # Steps reuse the memory of the state they are given, which the caller's arrays must survive.
    shapes = tuple(x.shape for x in jax.tree.leaves((params, jnp.zeros(()) if follow else None)))
    params, frozen, dropout_key = layout.put(
        (jax.tree.map(jnp.array, params), frozen, keys.dropout)
    )
    state = params, layout.put(jax.tree.map(jnp.array, noisy.init(wide(params))))
    step_fn = jax.jit(
        functools.partial(_step, loss_fn, noisy, privacy, layout, computation),
        donate_argnums=0,
        out_shardings=(jax.tree.map(layout.sharding, state), layout.sharding(jnp.zeros(()))),
    )
    # Checkpoints are written and deleted in the background, which has to end with the run, killed or not.
    with contextlib.ExitStack() as stack:
        stack.enter_context(reports.records(data, own))
        start, checkpoints = 0, None
        if privacy is not None and workdir is not None:
            folder = workdir / "checkpoints" / label
            checkpoints = stack.enter_context(contextlib.closing(Checkpoints(folder, finished)))
            start, state = checkpoints.restore(state)
            if finished and start != steps:
                raise CannotResumeError(
                    f"{workdir} holds a finished training whose result is gone: use a new workdir"
                )
        track = stack.enter_context(trackers.opened(workdir, label, start, steps))
        log = MetricLog(None if workdir is None else workdir / "metrics.jsonl", label, start, track)
        lines = Progress(label, steps, start, shown=monitoring.progress)
        ids = layout.own(_watch.record_ids(layout.rows))
        if users is None:
            records, draw = layout.records((data, ids)), None
        else:
            draw = people.drawing(users, data, ids, layout, keys.sampling)
        batches = sampling.batches(
            layout.rows,
            sampling_probability=probability,
            steps=steps,
            seed=keys.sampling,
            start=start,
            **({} if bands == 1 else {"groups": bands}),
        )
        ahead = bits_of_steps(keys.noise, shapes, layout, range(start, steps))
        stack.enter_context(contextlib.closing(ahead))
        for step, (indices, mask) in enumerate(batches, start=start):
            dropout = dropout_key, step
            _watch.key_used(jax.random.fold_in(*dropout), "dropout")
            batch = layout.batch(indices[mask], piece, room)
            if draw is not None:
                records, batch = draw(dropout, *batch)
            bits = None if privacy is None else next(ahead, None)
            state, loss = step_fn(state, records, batch, dropout, frozen, bits)
            if bits is not None:
                loss.block_until_ready()  # or the words of many steps would wait for their turn
            done = step + 1
            if done % monitoring.log_every == 0 or done == steps:
                spent = privacy.spent(done) if privacy is not None else None
                clip = {"l2_clip_norm": float(_clip(state))} if follow else {}
                log.write({"step": done, "loss": float(loss), "epsilon": spent} | clip)
                lines.line(done, float(loss), spent)
            if monitoring.evaluate is not None and done % monitoring.evaluate_every == 0:
                # Whoever keeps them has copies, since the next step reuses the memory of its state.
                found = monitoring.evaluate(jax.tree.map(jnp.copy, state[0]))
                log.write({"step": done} | evaluated(found))
            # Correlated noise is in the state, which is never written before it is of no use.
            writes = done == steps or (bands == 1 and done % monitoring.checkpoint_every == 0)
            if checkpoints is not None and writes:
                checkpoints.save(done, state)
    return state[0], log.history


def _mean(
    privacy: Privacy | None, batch_size: float, noise: jax.Array | Stream, label: str
) -> optax.GradientTransformation:
    """A transformation of the sum of a batch's gradients into their mean, which is noisy in a private run."""
    if privacy is None:
        return optax.scale(1 / batch_size)
    about: dict[str, Any] = {
        "noise_multiplier": privacy.noise_multiplier,
        "expected_batch_size": batch_size,
        "key": None if isinstance(noise, Stream) else noise,
        "label": f"gradients of {label}",
    }
    clips, ratio = privacy.l2_clip_norm, privacy.count_ratio
    if len(privacy.coefficients) > 1:
        sensitivity = math.hypot(*jax.tree.leaves(clips))
        return correlated.banded(
            coefficients=privacy.coefficients, sensitivity=sensitivity, **about
        )
    return privatize(l2_clip_norm=clips if ratio is None else adaptive.clips(ratio), **about)


def _step(
    loss_fn, optimizer, privacy, layout, computation, state, data, batch, dropout, frozen, bits
):
    """One step on a padded batch, in pieces of `computation.microbatch_size` records of each block.

    Returns the state and the mean loss of the real records in the batch.
    """
    (params, opt_state), (indices, mask, pieces) = state, batch
    piece = computation.microbatch_size
    clip = _clip(state) if privacy is not None and privacy.count_ratio is not None else None
    of_both = loss_fn if frozen is not None else lambda params, _, *row: loss_fn(params, *row)
    weight_fn = computation.weight_fn
    if computation.users is not None:
        of_both = people.mean_loss(of_both)
        weight_fn = None if weight_fn is None else people.mean(weight_fn)
    if privacy is None:
        gradient = functools.partial(_plain_gradient, of_both)
    else:
        gradient = functools.partial(_clipped_gradient, of_both, privacy, computation.strict)

    def sum_pieces(kept, held):
        params, frozen, clip, pieces, (dropout_key, number) = kept
        data, indices, mask = held

        def add_piece(index, totals):
            rows = jax.lax.dynamic_slice_in_dim(indices, index * piece, piece)
            real = jax.lax.dynamic_slice_in_dim(mask, index * piece, piece)
            batch, names = jax.tree.map(lambda array: array[rows], data)
            # A mask belongs to a record: were it that of a slot, each record would change those after it.
            if computation.users is None:  # else `names` are keys, drawn with the records
                names = record_keys(dropout_key, number, names)
            key = [names] if computation.record_key else []
            result = gradient(params, (frozen, clip), *batch, *key, mask=real)
            weights = real if weight_fn is None else jnp.where(real, jax.vmap(weight_fn)(*batch), 0)
            grads, loss, weight = totals
            return grads.add(result.grads), loss + result.losses.sum(), weight + weights.sum()

        # A plain running sum rounds by more than one record's gradient once it is long.
        zeros = meshes.zeros(wide(params if clip is None else (params, clip)))
        totals = (Sum(zeros, zeros), jnp.zeros(()), jnp.zeros(()))
        totals, loss, weight = jax.lax.fori_loop(0, pieces, add_piece, totals)
        return totals.result(), loss, weight

    grads, loss, weight = layout.sum_over_blocks(sum_pieces)(
        (params, frozen, clip, pieces, dropout), (data, indices, mask)
    )
    grads = layout.constrain(grads)
    words = {} if bits is None else {"bits": bits}
    updates, opt_state = optimizer.update(grads, opt_state, params, **words)
    loss = loss / jnp.where(weight > 0, weight, 1)
    return (optax.apply_updates(params, updates), opt_state), loss


def _clip(state):
    """The adaptive clipping norm, which lies behind the noise."""
    _, (_, follow, *_) = state
    return follow.clip


def _clipped_gradient(loss_fn, privacy, strict, params, held, *batch, mask):
    """The sum of clipped gradients. With an adaptive norm it is in units of that, beside the count."""
    frozen, clip = held

    def loss(both, *example):
        params, (frozen, clip) = both
        value = loss_fn(params, frozen, *example)
        return value if clip is None else value / clip

    gradient = clipped_grad(
        loss,
        l2_clip_norm=(privacy.l2_clip_norm if clip is None else 1.0, None),
        normalize=privacy.normalize,
        strict=strict,
        wrt=(True, False),
    )
    result = gradient((params, (frozen, clip)), *batch, mask=mask)
    # Of parameters of several types the sums may be wider than some of them.
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), result.grads[0], wide(params))
    losses = result.losses
    if clip is not None:
        grads = grads, adaptive.counted(result.norms[0], mask, privacy.count_ratio)
        losses = losses * clip
    return dataclasses.replace(result, grads=grads, losses=losses)


def _plain_gradient(loss_fn, params, held, *batch, mask):
    """The sum of the gradients of a batch, which are not clipped."""
    frozen, _ = held

    def total(params):
        losses = jax.vmap(loss_fn, (None, None, *(0 for _ in batch)))(params, frozen, *batch)
        losses = jnp.where(mask, losses, 0)
        return losses.sum(), losses

    (_, losses), grads = jax.value_and_grad(total, has_aux=True)(params)
    return ClippedGrads(wide(grads), jnp.zeros_like(losses), losses, ())


def wide(params):
    """The tree with leaves of float32 at least, the narrowest type of sums and noise."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), params)
