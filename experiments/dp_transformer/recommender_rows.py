"""The rows of a recommender's table: one function for each, which releases, trains and ranks."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx import privacy
from dpx.data import Histories
from dpx.launch.experiment import Plan, compares
from dpx.recommend import popularity
from dpx.training import keys as secrets
from experiments.dp_transformer import histories as recommender_data
from experiments.dp_transformer import models, next_item, ranking, training, warm_start

UNIT = "user"


@dataclasses.dataclass(frozen=True)
class Repetition:
    """One of `config.num_seeds` repetitions of all rows that are random, each with releases of its own."""

    config: Any
    workdir: Path
    prepared: recommender_data.Prepared
    assumptions: tuple[str, ...]
    number: int
    keys: secrets.Keys  # of the run

    @property
    def seed(self) -> int:
        return self.config.seed + self.number

    @property
    def suffix(self) -> str:
        """What tells the releases of this repetition from those of the first."""
        return f"_seed{self.seed}" if self.number else ""

    def noise(self, release: str) -> jax.Array:
        """The key of a release of this repetition."""
        return self.keys.noise(f"{release}{self.suffix}")


class Model(NamedTuple):
    """A model before it is trained, and what it starts from."""

    tokenized: recommender_data.Prepared  # items as the model's tokens
    graph: nnx.GraphDef
    params: Any
    start: warm_start.Start | None


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      name: Of the row.
      metrics: NDCG and HIT.
      guarantee: Of all that the row rests on; None where that is not private.
      alone: The same without a prior that several rows start from, where there is one.
    """

    name: str
    metrics: dict[str, float]
    guarantee: privacy.PrivacyGuarantee | None = None
    alone: privacy.PrivacyGuarantee | None = None


def rows(repetition: Repetition, bias, start, prior, exact: np.ndarray) -> Iterator[Row]:
    """The rows that a model makes, in order, for the output bias or the start that `prior` has bought."""
    if start is not None and compares(repetition.config):
        yield _transitions(repetition)
    model = _model(repetition, bias, start)
    if start is not None:
        yield _start(repetition, model, prior)
    for name in models.private_rows(repetition.config):
        yield _private_model(repetition, model, name, prior)
    if repetition.config.non_private.steps:
        known = exact if start is None else None
        yield _model_without_privacy(repetition, _model(repetition, known, start))


def dp_popularity(repetition: Repetition) -> Row:
    """The whole budget on one histogram."""
    config, prepared = repetition.config, repetition.prepared
    noisy = popularity.fit(
        repetition.noise("dp_popularity"),
        prepared.train,
        epsilon=config.epsilon,
        delta=config.delta,
        age_decay=config.popularity_age_decay,
    )
    scores = noisy.log_probabilities()
    found = evaluate(config, prepared, lambda *_: scores)
    return Row("dp_popularity", found, noisy.guarantee.assuming(*repetition.assumptions))


def _transitions(repetition: Repetition) -> Row:
    """The whole budget on what the model would start from."""
    config, key = repetition.config, repetition.noise("transitions")
    whole, guarantee = warm_start.fit(key, repetition.prepared.train, config, budget_fraction=1.0)
    # Each release keeps items of its own, which are its tokens.
    tokenized = recommender_data.prepare(config, whole)
    found = evaluate(config, tokenized, next_item.start_scorer(whole))
    return Row("transitions", found, guarantee.assuming(*repetition.assumptions))


def _start(repetition: Repetition, model: Model, prior: privacy.PrivacyGuarantee) -> Row:
    """What the model starts from, before training: the rows that follow rest on its release too."""
    assert model.start is not None
    found = evaluate(repetition.config, model.tokenized, next_item.start_scorer(model.start))
    return Row("start", found, prior.assuming(*repetition.assumptions))


def _private_model(repetition: Repetition, model: Model, name: str, prior) -> Row:
    """The model trained with DP-SGD on what the prior leaves of the budget; saves the first repetition's."""
    config, tokenized = repetition.config, model.tokenized
    corrected = name == "dp_reattention"
    calibrated = models.calibrate(
        config,
        tokenized.records,
        config.data.max_length,
        UNIT,
        repetition.assumptions,
        prior=prior,
        correction_key=repetition.noise("token probabilities") if corrected else None,
    )
    score = next_item.scorer(model.graph, calibrated.noise, model.start)
    measured = functools.partial(_evaluate_model, config, tokenized, score)
    last_only = config.train.loss == "last"
    trained = training.train(
        functools.partial(next_item.loss, model.graph, calibrated.noise, model.start, last_only),
        model.params,
        data=tokenized[2:6],
        config=config.train,
        keys=repetition.keys,
        label=f"{name}{repetition.suffix}",
        workdir=repetition.workdir,
        privacy=calibrated.privacy,
        mesh=config.mesh,
        evaluate=measured if config.train.evaluate_every else None,
    )
    if not repetition.number:
        kept = (model.start, repetition.prepared.train, tokenized.records.num_items)
        next_item.save(repetition.workdir, trained, calibrated.noise, *kept)
    return Row(name, measured(trained), calibrated.guarantee, calibrated.alone)


def _model_without_privacy(repetition: Repetition, model: Model) -> Row:
    """The same model without clipping and noise, as a ceiling."""
    config = repetition.config
    last_only = config.train.loss == "last"
    trained = training.train(
        functools.partial(next_item.loss, model.graph, None, model.start, last_only),
        model.params,
        data=model.tokenized[2:6],
        config=training.without_privacy(config),
        keys=repetition.keys,
        label=f"{config.model.kind}{repetition.suffix}",
        workdir=repetition.workdir,
        privacy=None,
        mesh=config.mesh,
    )
    score = next_item.scorer(model.graph, None, model.start)
    found = _evaluate_model(config, model.tokenized, score, trained)
    return Row(config.model.kind, found)


def prior(
    config, train: Histories, key: jax.Array
) -> tuple[np.ndarray | None, warm_start.Start | None, privacy.PrivacyGuarantee | None]:
    """The output bias, or the start, that a share of the budget pays for, and its guarantee."""
    if config.start.budget_fraction:
        return None, *warm_start.fit(key, train, config, config.start.budget_fraction)
    if config.popularity_budget_fraction == 0:
        return None, None, None
    spent = config.popularity_budget_fraction * config.epsilon
    decay = config.popularity_age_decay
    noisy = popularity.fit(key, train, epsilon=spent, delta=config.delta, age_decay=decay)
    return noisy.log_probabilities(), None, noisy.guarantee


def plan(config, num_users: int) -> Plan:
    """What all repetitions will release: the labels are those of what `recommender.run` composes."""

    def histogram(epsilon: float, delta: float = config.delta) -> privacy.PrivacyGuarantee:
        return privacy.gaussian_guarantee(
            epsilon,
            delta,
            neighboring=privacy.ADD_OR_REMOVE_ONE,
            unit=UNIT,
            mechanism="item popularity, or transitions",
        )

    once, prior, compared = {}, None, compares(config)
    if compared:
        once["dp_popularity"] = histogram(config.epsilon)
    if config.start.budget_fraction:
        prior = histogram(*warm_start.budget(config, config.start.budget_fraction))
        once["start"] = prior
        if compared:
            once["transitions"] = histogram(*warm_start.budget(config, 1.0))
    elif config.popularity_budget_fraction:
        prior = histogram(config.popularity_budget_fraction * config.epsilon)
        once["prior"] = prior
    trained, parameters = models.plan(config, num_users, UNIT, prior=prior)
    suffixes = ["", *(f"_seed{config.seed + number}" for number in range(1, config.num_seeds))]
    releases = {
        f"{x}{suffix}": spent for suffix in suffixes for x, spent in (once | trained).items()
    }
    shares = ("popularity_budget_fraction", "start_budget_fraction")
    parameters |= dict(
        zip(shares, (config.popularity_budget_fraction, config.start.budget_fraction), strict=True)
    )
    return Plan(releases, parameters | {"seeds": config.num_seeds})


def planned(config, train: Histories, assumptions: tuple[str, ...]) -> privacy.PrivacyGuarantee:
    """What the model that a run saves will cost, with the prior that it starts from. Nothing is released."""
    key = jax.random.key(0)
    _, start, spent = prior(config, train, key)
    tokenized = recommender_data.prepare(config, start)
    return models.calibrate(
        config,
        tokenized.records,
        config.data.max_length,
        UNIT,
        assumptions,
        prior=spent,
        correction_key=key if config.reattention.enabled else None,
    ).guarantee


def _model(repetition: Repetition, bias, start: warm_start.Start | None) -> Model:
    """A new model, with an output bias or a start where there is one."""
    config, tokenized = repetition.config, repetition.prepared
    if start is not None:
        tokenized = recommender_data.prepare(config, start)
    graph, params = next_item.build(
        config, tokenized.records.num_items, repetition.seed, bias, start
    )
    return Model(tokenized, graph, params, start)


def evaluate(config, prepared: recommender_data.Prepared, score) -> dict[str, float]:
    """NDCG@k and HIT@k of the scores that histories and their mask get."""

    def of_users(rows: np.ndarray):
        own = jnp.asarray(score(prepared.histories[rows], prepared.history_mask[rows]))
        return jnp.atleast_2d(own)

    return ranking.evaluate(config, prepared.seen, prepared.next_items, of_users)


def _evaluate_model(config, prepared, score, params) -> dict[str, float]:
    return evaluate(config, prepared, functools.partial(score, params))
