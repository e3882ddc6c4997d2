"""The models that a config can ask for, and what Re-Attention needs to know about their noise."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import dpx
from dpx import attention, reattention
from dpx.data import Histories
from dpx.nn.recurrent import Recurrent
from dpx.nn.transformer import Transformer
from dpx.training import checkpoints
from experiments import checks, guarantees
from experiments.dp_transformer import training

KINDS = ("transformer", "gru", "lstm")
PROBABILITIES = ("release", "uniform", "public")


def check(config, num_tokens: int) -> None:
    """Raises ValueError or FileNotFoundError for sections `model` and `reattention` that cannot be used."""
    checks.choice(config, "model.kind", KINDS)
    # What the models do not check themselves: a width of 0 is none given to them.
    checks.integers(config, "model.mlp_dim")
    try:
        nnx.eval_shape(lambda: build(config, num_tokens, length=1, seed=0))
    except ValueError as error:
        raise ValueError(f"config.model: {error}") from None
    _check_shares(config)
    ours = config.reattention
    if not ours.enabled:
        return
    if config.model.kind != "transformer":
        raise ValueError(
            f"config.reattention.enabled needs attention, which model.kind={config.model.kind!r} has not"
        )
    checks.choice(config, "reattention.probabilities", PROBABILITIES)
    if ours.probabilities == "release" and not 0 < ours.budget_fraction < 1:
        raise ValueError(
            f"config.reattention.budget_fraction={ours.budget_fraction} buys no token probabilities, "
            "without which epsilon says "
            "nothing about the error of an embedding: use a share in (0, 1), or probabilities='uniform'"
        )
    checks.integers(config, "reattention.max_tokens")
    checks.positive(config, "reattention.scale", zero=True)
    if ours.probabilities == "public":
        _public(ours.path, num_tokens)


def _check_shares(config) -> None:
    """Raises ValueError where the releases beside a training leave nothing that it could be done for."""
    begun = "prior.budget_fraction", "popularity_budget_fraction", "start.budget_fraction"
    shares = {name: share for share, name in checks.values(config, begun) if share}
    more = ["choice_budget_fraction"] if shares else []
    if config.reattention.enabled and config.reattention.probabilities == "release":
        more.append("reattention.budget_fraction")
    shares |= {name: share for share, name in checks.values(config, more)}
    if round(sum(shares.values()), 9) > 0.99:
        raise ValueError(
            f"{' and '.join(f'{name}={share}' for name, share in shares.items())} must leave some of the "
            "budget for training: let them add up to at most 0.99"
        )


def private_rows(config) -> tuple[str, ...]:
    """The names of a table's privately trained rows, the last of which is saved."""
    return (f"dp_{config.model.kind}", *(["dp_reattention"] if config.reattention.enabled else []))


def build(config, num_tokens: int, length: int, seed: int) -> Any:
    """A new model over `num_tokens` tokens for inputs of `length`."""
    settings = config.model.to_dict()
    kind = settings.pop("kind")
    if kind != "transformer":
        for name in ("num_heads", "mlp_dim"):
            settings.pop(name, None)
        return Recurrent(num_tokens, length, cell=kind, **settings, rngs=nnx.Rngs(seed))
    own = None if config.reattention.renormalize else _literal_attention
    return Transformer(num_tokens, length, **settings, attention=own, rngs=nnx.Rngs(seed))


class Calibrated(NamedTuple):
    """A private training run before it starts: its noise, guarantee, and effect on parameters."""

    privacy: training.Privacy
    guarantee: dpx.PrivacyGuarantee
    alone: dpx.PrivacyGuarantee  # without the prior, which other runs may start from too
    noise: reattention.ParameterNoise | None


def _literal_attention(q, k, v, *key_variance, mask):
    """Attention of `config.reattention.renormalize=False`: plain in rows without correction."""
    if not key_variance:
        return attention.dot_product_attention(q, k, v, mask=mask)
    return reattention.attend(q, k, v, *key_variance, mask=mask, renormalize=False)


def calibrate(
    config,
    histories: Histories,
    length: int,
    unit: str,
    assumptions: tuple[str, ...],
    *,
    prior: dpx.PrivacyGuarantee | None,
    correction_key: jax.Array | None,
    choice: dpx.PrivacyGuarantee | None = None,
) -> Calibrated:
    """Shares the budget between the releases beside a training run and the run.

    Args:
      config: With `epsilon`, `delta`, `train` and `reattention`.
      histories: The records as sets of tokens.
      length: Longest input, which uniform token probabilities depend on.
      unit, assumptions: Of the guarantee.
      prior: A release that the model starts from.
      correction_key: Switches Re-Attention on; noise of the token probabilities, if those are released.
      choice: Of what comes after training, if that is paid for too.
    """
    own = {} if choice is None else {"choice of a model": choice}
    released = None
    if correction_key is not None and config.reattention.probabilities == "public":
        assumptions = (
            *assumptions,
            "the token probabilities of config.reattention.path are public",
        )
    if correction_key is not None and config.reattention.probabilities == "release":
        released = reattention.token_probabilities(
            correction_key,
            histories,
            epsilon=config.reattention.budget_fraction * config.epsilon,
            delta=config.delta,
            max_tokens=config.reattention.max_tokens,
            unit=unit,
        )
        own["token probabilities"] = released.guarantee
    found = _shared(config, len(histories.items), unit, assumptions, prior, own)
    if correction_key is None:
        return found
    multiplier = found.privacy.noise_multiplier
    noise = _parameter_noise(config, released, multiplier, histories.num_items, length)
    return found._replace(noise=noise)


def _shared(
    config,
    num_records: int,
    unit: str,
    assumptions: tuple[str, ...],
    prior: dpx.PrivacyGuarantee | None,
    own: dict[str, dpx.PrivacyGuarantee],
) -> Calibrated:
    """The training run on what a prior, and other releases of this row's own, leave of the budget."""
    beside = own if prior is None else {"prior release": prior, **own}
    privacy, guarantee = training.make_private(
        config.train,
        config.epsilon,
        config.delta,
        num_records,
        unit,
        assumptions,
        beside=together(config, beside),
        beside_label=", ".join(beside),
    )
    alone = guarantee
    if prior is not None:
        assert privacy.alone is not None
        alone = together(config, own | {"DP-SGD": privacy.alone})
        assert alone is not None
    return Calibrated(privacy, guarantee, alone, None)


def together(config, spent: dict[str, dpx.PrivacyGuarantee]) -> dpx.PrivacyGuarantee | None:
    """Several guarantees as one, the only one as it is."""
    if len(spent) < 2:
        return next(iter(spent.values()), None)
    ledger = dpx.Ledger()
    for label, guarantee in spent.items():
        ledger.spend(guarantee, label)
    return ledger.guarantee(config.delta)


def plan(
    config,
    num_records: int,
    unit: str,
    *,
    prior: dpx.PrivacyGuarantee | None,
    choice: dpx.PrivacyGuarantee | None = None,
) -> tuple[dict[str, dpx.PrivacyGuarantee], dict[str, Any]]:
    """What the private rows will cost beside the prior, by row, and the parameters of their training.

    A choice after training is paid for by the last row, which is the one that is chosen or not.
    """
    releases, parameters = {}, {}
    rows = private_rows(config)
    for row in rows:
        own = {} if choice is None or row != rows[-1] else {"choice of a model": choice}
        if row == "dp_reattention" and config.reattention.probabilities == "release":
            spent = config.reattention.budget_fraction * config.epsilon
            label = "token probabilities"
            own[label] = guarantees.gaussian(spent, config.delta, label, unit)
        found = _shared(config, num_records, unit, (), prior, own)
        releases[row] = found.alone
        if not parameters:
            about = found.privacy, found.guarantee.epsilon
            parameters = training.parameters(config.train, num_records, *about)
        else:
            parameters["reattention_noise_multiplier"] = found.privacy.noise_multiplier
    return releases, parameters


def _parameter_noise(
    config,
    released: reattention.TokenProbabilities | None,
    noise_multiplier: float,
    num_tokens: int,
    length: int,
) -> reattention.ParameterNoise:
    """Noise of the parameters under `config.train`, multiplied by `config.reattention.scale`."""
    ours = config.reattention
    if released is not None:
        probabilities = released.values
    elif ours.probabilities == "public":
        probabilities = _public(ours.path, num_tokens)
    else:
        probabilities = reattention.uniform_probabilities(num_tokens, length)
    settings = (noise_multiplier, config.train.batch_size)
    embedding, rest = (
        ours.scale
        * reattention.effective_noise_std(
            *settings, p, l2_clip_norm=config.train.l2_clip_norm, floor=ours.floor
        )
        for p in (probabilities, None)
    )
    return reattention.ParameterNoise(jnp.asarray(embedding), jnp.asarray(rest))


def save(workdir: Path, params, noise_std: reattention.ParameterNoise | None, **more) -> None:
    """Saves a private model, with the noise that its attention is corrected for."""
    content = {"params": params, **more}
    checkpoints.save_model(
        workdir, content | ({} if noise_std is None else {"noise_std": noise_std._asdict()})
    )


def load(config, workdir: Path, params, num_tokens: int, **more):
    """Parameters, noise_std (None without) and `more` as `save` saved them, shaped as the templates."""
    template = {"params": params, **more}
    if config.reattention.enabled:
        template["noise_std"] = {
            "embedding": np.zeros(num_tokens, np.float32),
            "rest": np.zeros((), np.float32),
        }
    saved = checkpoints.load_model(workdir, template)
    noise_std = saved.get("noise_std")
    found = None if noise_std is None else reattention.ParameterNoise(**noise_std)
    return saved["params"], found, *(saved[name] for name in more)


def _public(path: str | None, num_tokens: int) -> np.ndarray:
    if path is None:
        raise ValueError(
            "config.reattention.path is missing: probabilities='public' reads a text file of one "
            "probability a token"
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file; check --config.reattention.path")
    values = np.loadtxt(path, ndmin=1)
    if values.shape != (num_tokens,) or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"{path} must hold {num_tokens} probabilities in [0, 1], one a line")
    return values
