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
from dpx.recommend import popularity
from dpx.runs.experiment import Plan, compares
from dpx.training import keys as secrets
from experiments import guarantees
from experiments.dp_transformer import (
    choice,
    models,
    next_item,
    ranking,
    training,
    warm_start,
)
from experiments.dp_transformer import histories as recommender_data

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
      adds: What of it no row before has released; None where that is nothing.
      words: To say under the table.
    """

    name: str
    metrics: dict[str, float]
    guarantee: privacy.PrivacyGuarantee | None = None
    adds: privacy.PrivacyGuarantee | None = None
    words: str = ""


class Trained(NamedTuple):
    """A private model, what it ranks for each user, by metric, and what it cost (`Row`)."""

    params: Any
    noise: Any
    by_user: dict[str, np.ndarray]
    row: Row


def rows(repetition: Repetition, bias, start, prior) -> Iterator[Row]:
    """The rows that a private model makes, for the output bias or the start that `prior` has bought."""
    if start is not None and compares(repetition.config):
        yield _transitions(repetition)
    model = new_model(repetition, bias, start)
    begun = None
    if prior is not None:
        begun, row = _start(repetition, model, prior)
        yield row
    *others, last = models.private_rows(repetition.config)
    for name in others:
        yield _private_model(repetition, model, name, prior).row
    paid = choice.guarantee(repetition.config, prior, UNIT, repetition.assumptions)
    trained = _private_model(repetition, model, last, prior, paid)
    yield trained.row
    if paid is None:
        _save(repetition, model, trained.params, trained.noise)
    else:
        assert begun is not None
        yield _served(repetition, model, begun, trained)


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
    spent = noisy.guarantee.assuming(*repetition.assumptions)
    return Row("dp_popularity", found, spent, spent)


def _transitions(repetition: Repetition) -> Row:
    """The whole budget on what the model would start from."""
    config, key = repetition.config, repetition.noise("transitions")
    whole, guarantee = warm_start.fit(key, repetition.prepared.train, config, budget_fraction=1.0)
    # Each release keeps items of its own, which are its tokens.
    tokenized = recommender_data.known_to(config, repetition.prepared, whole)
    found = evaluate(config, tokenized, next_item.start_scorer(whole))
    spent = guarantee.assuming(*repetition.assumptions)
    return Row("transitions", found, spent, spent)


def _start(
    repetition: Repetition, model: Model, prior: privacy.PrivacyGuarantee
) -> tuple[dict[str, np.ndarray], Row]:
    """The model before training, by user too: the rows that follow rest on its release as well."""
    score = functools.partial(next_item.scorer(model.graph, None, model.start), model.params)
    found = by_user(repetition.config, model.tokenized, score)
    spent = prior.assuming(*repetition.assumptions)
    return found, Row("start", ranking.means(found), spent, spent)


def _private_model(
    repetition: Repetition,
    model: Model,
    name: str,
    prior,
    chosen: privacy.PrivacyGuarantee | None = None,
) -> Trained:
    """The model trained with DP-SGD on what the prior, and a choice afterwards, leave of the budget."""
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
        choice=chosen,
    )
    score = next_item.scorer(model.graph, calibrated.noise, model.start)

    def of_users(params) -> dict[str, np.ndarray]:
        return by_user(config, tokenized, functools.partial(score, params))

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
        evaluate=(lambda p: ranking.means(of_users(p))) if config.train.evaluate_every else None,
    )
    found = of_users(trained)
    row = Row(name, ranking.means(found), calibrated.guarantee, calibrated.alone)
    return Trained(trained, calibrated.noise, found, row)


def _served(
    repetition: Repetition, model: Model, begun: dict[str, np.ndarray], trained: Trained
) -> Row:
    """The better of the trained model and its start, by a choice that is paid for; saves the first one."""
    config, metric = repetition.config, f"ndcg@{repetition.config.evaluate.k}"
    key, values = repetition.noise("choice"), (trained.by_user[metric], begun[metric])
    lead = choice.lead(key, config, *values)
    if lead > 0:
        _save(repetition, model, trained.params, trained.noise)
        found = trained.by_user
    else:  # where training began, and no correction for noise that is not there
        _save(repetition, model, model.params, jax.tree.map(jnp.zeros_like, trained.noise))
        found = begun
    served, words = trained.row.guarantee, choice.words(config, lead)
    return Row("served", ranking.means(found), served, words=words)


def _save(repetition: Repetition, model: Model, params: Any, noise: Any) -> None:
    """Saves the model of the first repetition."""
    if not repetition.number:
        kept = (model.start, repetition.prepared.train, model.tokenized.records.num_items)
        next_item.save(repetition.workdir, params, noise, *kept)


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


def plan(config, num_users: int, assumptions: tuple[str, ...]) -> Plan:
    """What all repetitions will release: the labels are those of what `recommender.run` composes."""

    def histogram(epsilon: float, delta: float = config.delta) -> privacy.PrivacyGuarantee:
        return guarantees.gaussian(epsilon, delta, "item popularity, or transitions", UNIT)

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
        once["start"] = prior
    chosen = choice.guarantee(config, prior, UNIT, assumptions)
    trained, parameters = models.plan(config, num_users, UNIT, prior=prior, choice=chosen)
    suffixes = ["", *(f"_seed{config.seed + number}" for number in range(1, config.num_seeds))]
    releases = {
        f"{x}{suffix}": spent for suffix in suffixes for x, spent in (once | trained).items()
    }
    parameters |= {
        "popularity_budget_fraction": config.popularity_budget_fraction,
        "start_budget_fraction": config.start.budget_fraction,
        "choice_budget_fraction": config.choice_budget_fraction,
    }
    return Plan(releases, parameters | {"seeds": config.num_seeds})


def planned(config, train: Histories, assumptions: tuple[str, ...]) -> privacy.PrivacyGuarantee:
    """What the model that a run saves will cost, with the prior that it starts from. Nothing is released."""
    key = secrets.secret_key()
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
        choice=choice.guarantee(config, spent, UNIT, assumptions),
    ).guarantee


def new_model(repetition: Repetition, bias, start: warm_start.Start | None) -> Model:
    """A new model, with an output bias or a start where there is one."""
    config, tokenized = repetition.config, repetition.prepared
    if start is not None:
        tokenized = recommender_data.known_to(config, tokenized, start)
    graph, params = next_item.build(
        config, tokenized.records.num_items, repetition.seed, bias, start
    )
    return Model(tokenized, graph, params, start)


def evaluate(
    config,
    prepared: recommender_data.Prepared,
    score,
    assumption: str | None = ranking.ASSUMPTION,
) -> dict[str, float]:
    """NDCG@k and HIT@k of the scores that histories and their mask get."""
    return ranking.means(by_user(config, prepared, score, assumption), assumption)


def by_user(
    config,
    prepared: recommender_data.Prepared,
    score,
    assumption: str | None = ranking.ASSUMPTION,
) -> dict[str, np.ndarray]:
    """The same of each evaluated user, (U,)."""

    def of_users(rows: np.ndarray):
        own = jnp.asarray(score(prepared.histories[rows], prepared.history_mask[rows]))
        return jnp.atleast_2d(own)

    return ranking.by_user(config, prepared.seen, prepared.next_items, of_users, assumption)
