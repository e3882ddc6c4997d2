"""The training section of a config: its checks, its optimizer, its calibration, and a run of the loop."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from dpx.data.records import num_units, of_units
from dpx.noise import stream
from dpx.training import loop, precision
from dpx.training.arguments import check_sampling
from dpx.training.calibration import Privacy, calibrate, public_size, warn_about_delta
from dpx.training.keys import Keys
from dpx.training.layout import Layout, as_mesh, share, whole
from dpx.training.log import Monitoring
from dpx.training.sampling import NAMES
from dpx.training.users import numbered
from experiments import checks
from experiments.dp_transformer import without_privacy

__all__ = [
    "Privacy",
    "check",
    "check_both",
    "make_private",
    "parameters",
    "public_size",
    "train",
    "warn_about_delta",
]


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
    mesh: Any = None,
    users: np.ndarray | None = None,
    weight_fn: Callable[..., jax.Array] | None = None,
    frozen: Any = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
) -> Any:
    """Runs `dpx.training.loop.train` as a config says, and returns the parameters.

    Every process is given all examples, trains on its share of them, and gets all parameters whole.

    Args:
      loss_fn: (params, *example, key) -> scalar loss of one example; `key` is for dropout.
      params: Initial parameters, any tree of arrays.
      data: Arrays with one row per example.
      config: A section with `steps`, `batch_size` (expected), `microbatch_size`, `learning_rate`, `warmup`
        (share of the steps), `weight_decay`, `log_every` and `checkpoint_every` (steps). It has
        `compute_dtype` if that is not the type of the parameters, `l2` for a penalty λ/2 ‖parameters‖², and
        `secure` if samples and noise are drawn from cryptographic streams; with `evaluate` `evaluate_every`
        (steps), and with `users` `records_per_user`.
      keys: The keys of the run, from which those of the training follow by its label.
      mesh: The section `mesh` of a config, if it has one.
      users: (n,) the user of each example, as in `dpx.data.Texts`: `batch_size` then counts users. Without
        privacy nothing bounds what a user adds, and batches are of examples.
      privacy, frozen: As there.
      label, workdir, evaluate: As in `dpx.training.log.Monitoring`.
      weight_fn: As in `dpx.training.loop.Computation`.
    """
    users = None if privacy is None else users
    rows, whose = of_units(users, share(np.arange(num_units(data[0], users))))
    grouped = None
    if whose is not None:
        grouped = numbered(whose, num_units(whose, whose), config.records_per_user)
    # Of one process that is all of them, which are not copied.
    data = tuple(x[rows] for x in data) if len(rows) < len(data[0]) else data
    layout = Layout(sizes(mesh), len(rows) if grouped is None else len(grouped))

    def gathered(params: Any) -> Any:
        if layout.mesh is None:
            return params
        return jax.tree.map(lambda x: jnp.asarray(whole(x)), params)

    trained, _ = loop.train(
        loss_fn,
        params,
        data,
        optimizer=optimizer(config),
        batch_size=config.batch_size,
        steps=config.steps,
        keys=keys.training(label, secure=privacy is not None and config.get("secure", False)),
        privacy=privacy,
        monitoring=Monitoring(
            label,
            workdir,
            evaluate=None if evaluate is None else lambda params: evaluate(gathered(params)),
            evaluate_every=1 if evaluate is None else config.evaluate_every,
            log_every=config.log_every,
            checkpoint_every=config.checkpoint_every,
        ),
        computation=loop.Computation(
            compute_dtype=config.get("compute_dtype"),
            microbatch_size=config.microbatch_size,
            record_key=True,
            users=grouped,
            weight_fn=weight_fn,
        ),
        frozen=frozen,
        layout=layout,
    )
    return gathered(trained)


def sizes(mesh: Any) -> dict[str, int] | None:
    """The axes that a section `mesh` asks for, or None where it asks for one device."""
    asked = {
        axis: size for axis, size in ({} if mesh is None else mesh).items() if size is not None
    }
    return None if asked == {"model": 1} else asked or None


def optimizer(config: Any) -> optax.GradientTransformation:
    """AdamW, its learning rate rising for a share `warmup` of the steps and then falling to zero."""
    warmup = max(1, round(config.warmup * config.steps))
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(config.learning_rate / warmup, config.learning_rate, warmup),
            optax.linear_schedule(config.learning_rate, 0.0, max(1, config.steps - warmup)),
        ],
        [warmup],
    )
    adam = optax.adamw(schedule, weight_decay=config.weight_decay)
    penalty = config.get("l2", 0.0)  # in the gradient, so that the optimum is that of the sum
    return optax.chain(optax.add_decayed_weights(penalty), adam) if penalty else adam


def check(config: Any, num_examples: int, *, name: str = "config.train") -> None:
    """Raises ValueError for a training section, named so, that cannot be used."""
    if not 0 < config.batch_size <= num_examples:
        raise ValueError(
            f"{name}.batch_size={config.batch_size} gives a sampling probability outside (0, 1] "
            f"for {num_examples} records: use at most that many"
        )
    precision.check(config.get("compute_dtype"), f"{name}.compute_dtype")
    if config.get("secure", False):
        stream.check()
    counts = ("steps", "microbatch_size", "log_every", "checkpoint_every", "records_per_user")
    checks.integers(config, *counts, prefix=name)
    checks.positive(config, "learning_rate", "l2_clip_norm", prefix=name)
    checks.positive(config, "weight_decay", "l2", zero=True, prefix=name)
    if not 0 <= config.warmup <= 1:
        raise ValueError(f"{name}.warmup={config.warmup} must be a share of the steps, in [0, 1]")
    checks.choice(config, "accountant", ("pld", "rdp"), prefix=name)
    checks.choice(config, "sampling", NAMES, prefix=name)
    if config.accountant == "rdp" and config.get("sampling") == "allocation":
        raise ValueError(f"{name}.accountant='rdp' must be 'pld' with {name}.sampling='allocation'")


def check_both(
    config: Any, num_examples: int, *, parted: bool = True, users: np.ndarray | None = None
) -> None:
    """Raises ValueError where `config.train`, or the baseline without privacy if any, cannot be used.

    `parted` says whether a way to train the baseline is chosen by records that are held out meanwhile. With
    `users` (n,) there are `num_examples` users, and the baseline is trained on their n records.
    """
    as_mesh(sizes(config.mesh))
    check(config.train, num_examples)
    if "non_private" in config and config.non_private.steps != 0:
        ways = without_privacy.ways(config)
        rest = np.arange(num_examples)
        if parted and len(ways) > 1:
            _, rest = without_privacy.parts(config, num_examples)
        rows, _ = of_units(users, rest)
        for way in ways:
            check(way.section, len(rows), name="config.non_private")


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
    """Calibrates the training section to a budget: see `dpx.training.calibration.calibrate`."""
    if config.get("secure", False):
        assumptions = (*assumptions, stream.ASSUMPTION)
    found, guarantee = calibrate(
        epsilon=epsilon,
        delta=delta,
        num_examples=num_examples,
        batch_size=config.batch_size,
        steps=config.steps,
        l2_clip_norm=config.l2_clip_norm,
        normalize=config.normalize,
        accountant=config.accountant,
        unit=unit,
        assumptions=assumptions,
        sampling=check_sampling(config.get("sampling", "poisson"), config.batch_size),
        beside=beside,
        beside_label=beside_label,
    )
    if config.get("secure", False):
        stream.check_noise(found.noise_multiplier)
    return found, guarantee


def parameters(config: Any, num_examples: int, privacy: Privacy, epsilon: float) -> dict[str, Any]:
    """What a plan says about training: `epsilon` is that of the row, with what it starts from."""
    return {
        "noise_multiplier": privacy.noise_multiplier,
        "sampling_probability": config.batch_size / num_examples,
        "expected_batch_size": config.batch_size,
        "steps": config.steps,
        "epsilon": epsilon,
        "records": num_examples,
    }
