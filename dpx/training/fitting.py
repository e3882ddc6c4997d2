"""Private training of anyone's model in one call."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpx import _processes, _validate
from dpx._numerics import promoting
from dpx.clipping import groups, losses, reports
from dpx.clipping import params as parameters_of
from dpx.clipping.gradients import plan
from dpx.noise import stream
from dpx.privacy import PrivacyGuarantee
from dpx.training import (
    adaptive,
    arguments,
    calibration,
    loop,
    planning,
    precision,
    programs,
    purposes,
    trackers,
)
from dpx.training import keys as secrets
from dpx.training import log as logs
from dpx.training import users as people
from dpx.training.examples import as_examples, assumed
from dpx.training.layout import Layout
from dpx.training.sampling import Poisson, Sampling


class Trained(NamedTuple):
    """A trained model, and the guarantee of its parameters.

    Attributes:
      params: The trained parameters, of the type that `fit` was given. They may be shared.
      guarantee: The guarantee of `params`.
      history: A `dpx.training.Record` for each step that was reported: step, loss, ε spent, evaluation. Its
        losses and evaluations are computed on private data, and are not covered by the guarantee.
    """

    params: Any
    guarantee: PrivacyGuarantee
    history: list[logs.Record]

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What was computed on private data and is covered by no guarantee, in words."""
        return ("training loss and evaluation (history, metrics.jsonl, log, the progress line)",)


@promoting
def fit(
    loss_fn: Callable[..., jax.Array],
    params: Any,
    data: Any,
    *,
    epsilon: float,
    delta: float,
    key: jax.Array | secrets.Keys | None = None,
    batch_size: float | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
    l2_clip_norm: Any = None,
    normalize: bool = False,
    compute_dtype: Any = None,
    microbatch_size: int | None = None,
    sampling: Sampling | str = "auto",
    noise: str = "independent",
    bands: int | None = None,
    record_key: bool = False,
    secure: bool = False,
    users: Any = None,
    records_per_user: int | None = None,
    wrt: Any = None,
    strict: bool = False,
    unit: str = "record",
    assumptions: tuple[str, ...] = (),
    accountant: str = "pld",
    mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
    workdir: str | Path | None = None,
    label: str = "training",
    progress: bool = True,
    log: str | trackers.Tracker | None = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    evaluate_every: int | None = None,
    log_every: int | None = None,
    checkpoint_every: int | None = None,
) -> Trained:
    """Trains a model with differential privacy (DP-SGD; Abadi et al., arXiv:1607.00133).

        trained = dpx.training.fit(
            loss_fn, params, (inputs, targets), epsilon=3.0, delta=1e-5, batch_size=256, steps=500,
            optimizer=optax.adam(1e-3), l2_clip_norm=1.0, key=dpx.secret_key(),
        )

        trained = dpx.training.fit(
            loss_fn, params, (inputs, targets), epsilon=3.0, delta=1e-5, epochs=20, key=dpx.secret_key()
        )

    The second call chooses nothing but how long to train: `dpx.training.plan` gives batches and steps, and
    an optimizer finds its learning rate.

    The noise is calibrated to the budget. Each step takes a random batch of the records, clips the gradient
    of each to `l2_clip_norm`, adds noise to their sum once, and divides by the expected batch size.

    Guarantee: `params` are (ε, δ)-DP for adding or removing one record, which is one row of `data`, or with
    `users` for adding or removing one user with all of their records. The loss of a record must depend on
    nothing but the parameters, that record and its key. Initial parameters, and hyper-parameters, that were
    chosen on the same data are not paid for.

    Args:
      loss_fn: (params, *example) -> scalar loss of ONE example, without a batch axis.
      params: Initial parameters: a dict, a Linen or Haiku tree, an NNX state or module, an Equinox module,
        any pytree. They are not changed. Of an NNX module the `nnx.Param`s are trained.
      data: A tree of arrays with a leading axis of N records: NumPy, JAX, frames and columns of pandas or
        polars, or (nested) lists of numbers, all of one type. Or a source of N records, which has `__len__`
        and `__getitem__`, such as PyGrain's (`dpx.training.sources`): it is read once, into memory. A tuple,
        of the data or of a source's record, is passed to the loss as several arguments, anything else as one.
        Types that pandas or a reader of files infers follow from all records, which the guarantee then lists
        as an assumption: give arrays of a type that you chose.
      epsilon, delta: The budget, which is spent whole.
      batch_size: The expected batch size, at most N.
      steps: The number of steps.
      epochs: How often each record is used, in the mean, given in place of `batch_size`, of `steps` or of
        both. `dpx.training.plan` then chooses the rest by public numbers alone. A line on stderr says what
        was chosen (`progress`), and so does the guarantee.
      optimizer: An Optax optimizer, which sees the noisy mean gradients and the parameters, and no losses.
        None for Adam with a learning rate that is found meanwhile (`dpx.training.planning.untuned`).
      l2_clip_norm: The clipping norm, or a tree of them, as `dpx.clipped_grad` takes it; or a
        `dpx.training.AdaptiveClipNorm`, which follows a quantile of the norms at a small part of the budget.
        None scales every gradient to norm 1, as `normalize` does.
      key: A JAX key, such as `dpx.secret_key()`, or a run's `dpx.training.Keys`. Nobody who sees the result
        may know it. Noise, dropout and sampling follow from it and from `label`, so that trainings with
        different labels may share it. Two of one label would draw the same noise, which cancels: `Keys`
        refuse the second, unless it repeats the first in a `workdir`. A JAX key does not remember its uses:
        the second in one process is a warning, and so is a key that can be guessed, `jax.random.key(0)`.
        None with `secure`.
      normalize: Whether every gradient is scaled to the clipping norm, and not only those above it.
      compute_dtype: The type in which the loss computes, such as "bfloat16": parameters and examples are cast
        to it. Gradients, norms, sums, noise and the optimizer are in float32. Inside the loss, cast what
        needs more, such as logits before a softmax. A model that uses `jax.checkpoint` is then clipped in one
        pass, which takes more memory. None casts nothing.
      microbatch_size: The number of examples whose gradients are clipped at a time, to bound memory.
      sampling: How batches are drawn. "poisson" takes each record into each batch by itself, with probability
        batch_size / N. "allocation" puts each into one batch of each epoch of N / batch_size steps, chosen at
        random: every record is used in every epoch, which needs less noise where there are few. Neither is a
        shuffle that is cut into batches of one size, which no guarantee here covers: sizes vary, and sums are
        divided by the expected size. "auto" takes the one that needs less noise (`calibration.quieter`), and
        is Poisson sampling with banded noise or accountant="rdp". Or a value: `dpx.training.Allocation()`, or
        `dpx.training.Poisson(max_batch_size=...)`, which cuts samples off.
      noise: "independent" from step to step, or "banded": each step takes back a part of the noise of the
        `bands` − 1 steps before it (`dpx.training.correlated`, extra [correlated]). Each record is then in
        one of `bands` groups, at random, of which each step samples one. A killed call starts anew.
      bands: b of banded noise, from 2 to N / batch_size. With more of them more noise is taken back, and
        sampling protects less.
      record_key: Whether the loss takes a key after the example, for dropout. It follows from `key`, the step
        and the index of the record (`dpx.clipping.record_keys`): no record changes the mask of another.
      secure: Whether samples and noise are drawn from ChaCha20 (`dpx.noise.stream`), with 256 bits of the
        operating system's randomness, and not from JAX's generator, whose keys have 64. `key` is then None,
        or `Keys` that have such a secret. Samples and noise have the same laws (`dpx.noise.lattice`). Sums
        over records are still in floats, as `ClippedGrad.rounding` bounds them: releases that are made at
        once add up integers with their `secure=True`. Dropout masks are drawn by JAX, from a key of 64 bits,
        which must stay as unknown as the noise. Noise multipliers below 1/18, at which ε of one step is
        above 200, are refused, because the tail of such noise ends. It needs the extra [secure], and 17 bytes
        of memory for each parameter that is trained. Random words are made while the step before computes.
      users: The user of each record, where a person has several: (R,) text or whole numbers, in a list, an
        array or a column. Each is read by itself (`dpx.data.cells.identifier`). The unit is then the user
        (`dpx.training.users`), and N, `batch_size` and `microbatch_size` count users. A step samples users,
        draws records of each, and clips the gradient of their mean loss.
      records_per_user: G, how many records of a sampled user a step draws at most, anew in each step,
        uniformly and without replacement. A step computes batch_size · G losses; ε does not depend on it.
      wrt: Which parameters are trained, as `dpx.clipped_grad` takes it: a type such as `nnx.LoRAParam`, a
        function of (path, leaf), or a mask; None for all. The others stay as they are, at no cost.
      strict: Whether a `dpx.clipping.ClippingWarning` is an error, as in `dpx.clipped_grad`.
      unit: What one row of `data`, or with `users` a user, is called in the guarantee. Without `users` each
        unit must be in one row alone: with `unit="patient"` over rows that are visits only a visit is
        protected, and a patient with k of them k times less. Give the patients as `users`.
      assumptions: What else the guarantee rests on.
      accountant: "pld", which is tight, or "rdp".
      mesh: Devices to train on, as a mesh or as the sizes of its axes; None for one device. Along `data` each
        device holds a share of the records, and clips and adds up their gradients: {"data": 8}. Along `model`
        devices share every large array of the parameters and of the optimizer's state, and its noise, if one
        device has no room for all of it: {"data": 4, "model": 2}. Sample, noise and guarantee are the same on
        any mesh, and a repeated call may go on with another one. The result lies on the mesh. After
        `jax.distributed.initialize` each process calls `fit` with records or users of its own, which together
        are the data. The key is that of the first process. `workdir` and all other arguments are the same.
      workdir: A folder for checkpoints and metrics.jsonl. Repeat a killed call on the same data and with the
        same arguments: it goes on bitwise where it was, under the key that it began with. Until it has
        finished, that key lies in the folder, readable by its owner only. After that, a repeated call returns
        the finished result. Loss and optimizer are compared by the programs that JAX makes of them
        (`dpx.training.programs`), which another version of JAX may change: keep the version too.
        With a JAX key a folder is for one training; with `Keys`, for one of each label, and `Keys` of other
        secrets are refused.
      label: A plain name of the training, in metrics.jsonl, on the progress line and of its checkpoints. Each
        training under one key needs a label of its own.
      progress: Whether lines on stderr say how far it is. They have losses of private data, which no
        guarantee covers: say False where stderr goes to somebody else, such as to a log server.
      log: Where losses, ε and evaluations also go: "tensorboard" (a folder of `workdir`), "wandb" or
        "trackio" (each a package to install), a path that ends in .csv (in `workdir`, if there is one), or a
        function of a step and a dict of numbers. The names of numbers that no guarantee covers begin with
        `not_covered/`: they tell whoever reads the log about private data.
      evaluate: A function of the parameters that returns numbers by name, for the history. The guarantee does
        not cover them: where they are computed on private data, keep them to yourself.
      evaluate_every, log_every, checkpoint_every: Numbers of steps; by default a tenth of all steps.

    Raises:
      ValueError: for an argument that cannot be used, before any noise is drawn; for `Keys` that another
        training of this label was given.
      dpx.training.keys.CannotResumeError: for a `workdir` that holds a training of other data or arguments.
    """
    parameters_of.check_wrt(wrt)
    trained = parameters_of.flatten(params, wrt)
    examples, records = as_examples(data)
    grouped = people.grouped(users, records_per_user, records)
    units = "records" if grouped is None else "users"
    layout = Layout(mesh, records if grouped is None else len(grouped))
    rows = layout.rows
    epsilon, delta = _validate.check_epsilon(epsilon), _validate.check_delta(delta)
    calibration.warn_about_delta(delta, rows, units)
    batch_size, steps = planning.complete(
        calibration.public_size(rows),
        epsilon=epsilon,
        delta=delta,
        epochs=epochs,
        batch_size=batch_size,
        steps=steps,
        units=units,
    )
    taken = planning.taken(batch_size, steps, epochs, optimizer, l2_clip_norm, units)
    optimizer = planning.untuned(steps) if optimizer is None else optimizer
    if l2_clip_norm is None:
        l2_clip_norm, normalize = 1.0, True
    computation = loop.Computation(compute_dtype, microbatch_size, record_key, grouped, strict)
    asked = arguments.check_sampling(sampling, batch_size)
    bands = arguments.check_bands(noise, bands, steps, rows / batch_size, l2_clip_norm, asked)
    folder, tenth = None if workdir is None else Path(workdir), max(1, steps // 10)
    every = (tenth if x is None else x for x in (evaluate_every, log_every, checkpoint_every))
    monitoring = logs.Monitoring(label, folder, progress, evaluate, *every)
    _validate.check_choice(accountant, "accountant", ("pld", "rdp"))
    parts = ()  # which of several norms is of which array
    if not isinstance(l2_clip_norm, adaptive.AdaptiveClipNorm):
        parts = groups.assign(l2_clip_norm, trained.tree).members
    arguments.check_optimizer(
        optimizer, *jax.eval_shape(lambda tree: (tree, loop.wide(tree)), trained.tree)
    )
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r} must be a function of the parameters: pass one")
    normalize = arguments.check_flag(normalize, "normalize")
    secure = arguments.check_flag(secure, "secure")
    trackers.check(log, workdir)
    trackers.check_table(log, folder)
    assumptions = arguments.check_assumptions(assumptions)
    purposes.check(key, secure)

    constants = trained.constants
    # As arrays of JAX, which a loss may index by what it traces.
    frozen = {i: jnp.asarray(x) for i, x in enumerate(constants) if parameters_of.is_weight(x)}

    def rebuilt(tree: Any, frozen: dict[int, Any] = frozen) -> Any:
        given = [frozen.get(i, leaf) for i, leaf in enumerate(constants)]
        return trained.rebuild(jax.tree.leaves(tree), given)

    def loss(tree: Any, frozen: Any, *example: Any) -> jax.Array:
        return loss_fn(rebuilt(tree, frozen), *example)

    stated = unit  # in the guarantee
    if grouped is not None:
        stated = "user" if unit == "record" else unit
    elif unit != "record":
        stated = f"row of the data, which is called {unit}"
    privacy, guarantee = calibration.calibrate(
        epsilon=epsilon,
        delta=delta,
        num_examples=rows,
        batch_size=batch_size,
        steps=steps,
        l2_clip_norm=l2_clip_norm,
        normalize=normalize,
        accountant=accountant,
        unit=stated,
        assumptions=(
            *(() if grouped is None else (people.ASSUMPTION,)),
            *assumptions,
            *((stream.ASSUMPTION,) if secure else ()),
            *assumed(data),
        ),
        sampling=asked,
        bands=bands,
    )
    if secure:
        stream.check_noise(privacy.noise_multiplier)
    dtype, way = computation.compute_dtype, privacy.sampling
    # A repeated call must find these as they were, and all initial parameters. None counts as absent.
    settings = {
        "epsilon": epsilon,
        "delta": delta,
        "batch_size": batch_size,
        "steps": steps,
        "l2_clip_norm": [*adaptive.norms(l2_clip_norm), *(parts if any(parts) else ())],
        "normalize": normalize,
        "microbatch_size": computation.microbatch_size,
        "record_key": computation.record_key,
        "label": label,
        "sampling": None if way == Poisson() else dataclasses.asdict(way) | {"name": way.name},
        "compute_dtype": None if dtype is None else dtype.name,
        "bands": None if bands == 1 else bands,
        "accountant": None if accountant == "pld" else accountant,
        "unit": None if unit == "record" else unit,
        "assumptions": list(assumptions) or None,
        "secure": secure or None,
        "records_per_user": None if grouped is None else grouped.most,
        "wrt": None if wrt is None else list(trained.paths),
        "generator": None if (made := purposes.generator()) == "threefry2x32" else made,
    }
    narrow = precision.computed_in(computation.compute_dtype, loss)
    given = arguments.of_one_example((trained.tree, frozen), examples, computation.record_key)

    if grouped is not None:
        narrow, given = people.mean_loss(narrow), [*given[:2], *grouped.stacked(given[2:])]

    def of_one(leaves: Any, example: Any) -> jax.Array:
        return losses.scalar(narrow(trained.gradient_tree(leaves), frozen, *example))

    several = min(rows, 2)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((several, *x.shape), x.dtype), given[2:])
    reports.report_state(params, wrt, computation.strict)
    # Of users the number of records is not public, and no report may follow from it.
    known = records if grouped is None else len(grouped)
    with reports.of(computation.strict, examples, known, trained.holding(frozen)):
        # Raises what a loss of other parameters or examples raises.
        plan.forms(plan.read(of_one, trained.leaves, batch, microbatch_size != 1), "two_pass")
    if workdir is not None or _processes.several():
        wide = jax.eval_shape(loop.wide, trained.tree)
        settings["loss_fn"] = programs.of_loss(narrow, *given)
        settings["optimizer"] = programs.of_optimizer(optimizer, wide)
    _processes.check_same(settings | monitoring.every)
    if taken:
        logs.say(f"{label}: {taken}", shown=progress)
    whose = () if grouped is None else (grouped.order, grouped.begins)
    fixed = map(np.asarray, (*trained.leaves, *frozen.values(), *jax.tree.leaves(examples), *whose))
    with (
        secrets.of_training(key, folder, data=fixed, settings=settings) as opened,
        reports.told(),
        trackers.to(log),
    ):
        tree, history = loop.train(
            loss,
            trained.tree,
            examples,
            optimizer=optimizer,
            batch_size=batch_size,
            steps=steps,
            keys=opened.keys,
            finished=opened.finished,
            privacy=privacy,
            monitoring=dataclasses.replace(
                monitoring,
                evaluate=None if evaluate is None else lambda tree: evaluate(rebuilt(tree)),
            ),
            computation=computation,
            frozen=frozen,
            layout=layout,
        )
    return Trained(rebuilt(tree), guarantee, history)
