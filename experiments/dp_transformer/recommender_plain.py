"""The rows of a recommender's table that no guarantee covers: popularity, and the model without privacy."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from dpx.data import Histories, leave_last_out
from dpx.noise import secure
from dpx.recommend import popularity
from experiments.dp_transformer import histories as recommender_data
from experiments.dp_transformer import next_item, ranking, training, warm_start, without_privacy
from experiments.dp_transformer.recommender_rows import Repetition, Row, evaluate, new_model


def best_popularity(config, train: Histories) -> np.ndarray:
    """(M,) log of exact counts, under no guarantee: of two ways to count, the better one for training data.

    One counts every user of an item, and the other as the private popularity does, without noise. They are
    compared on the last item of each training history, which is left out then.
    """
    decay = config.popularity_age_decay

    def ways(histories: Histories) -> list[np.ndarray]:
        (weighted,) = popularity.statistic(histories, age_decay=decay).sums
        counts = popularity.count(histories), weighted / secure.STEPS
        return [np.log1p(counted) for counted in counts]

    split = leave_last_out(train)
    if not len(split.users):
        return ways(train)[0]
    known = split.train_and_validation
    seen = [known.items[user] for user in split.users]
    found = [
        ranking.evaluate(
            config, seen, split.test, lambda _, scores=scores: jnp.asarray(scores)[None], None
        )
        for scores in ways(known)
    ]
    values = [one[f"ndcg@{config.evaluate.k}"] for one in found]
    return ways(train)[int(np.argmax(values))]


def chosen(repetition: Repetition) -> without_privacy.Chosen:
    """How the model without privacy is trained, by training records; the first way where none can choose."""
    config = repetition.config
    inner = recommender_data.within(config, repetition.prepared.train)
    if not len(inner.next_items):
        way = without_privacy.ways(config)[0]
        return without_privacy.Chosen(way, f"{way}. No training history has an item to choose by.")
    part = dataclasses.replace(repetition, prepared=inner)

    def measured(way: without_privacy.Way, number: int) -> float:
        found = row(part, way, f"{config.model.kind}_tried{number}")
        return found.metrics[f"ndcg@{config.evaluate.k}"]

    return without_privacy.choose(config, measured, more_is_better=True)


def row(repetition: Repetition, way: without_privacy.Way, label: str) -> Row:
    """The model without clipping and noise: nothing of it comes from a private release."""
    config, train = repetition.config, repetition.prepared.train
    bias = start = None
    if way.start == "exact" and config.start.budget_fraction:
        start = warm_start.exact(train, config)
    elif way.start == "exact":
        bias = best_popularity(config, train)
    model = new_model(repetition, bias, start)
    last_only = config.train.loss == "last"
    trained = training.train(
        functools.partial(next_item.loss, model.graph, None, model.start, last_only),
        model.params,
        data=model.tokenized[2:6],
        config=way.section,
        keys=repetition.keys,
        label=label,
        workdir=repetition.workdir,
        privacy=None,
        mesh=config.mesh,
    )
    score = next_item.scorer(model.graph, None, model.start)
    found = evaluate(config, model.tokenized, functools.partial(score, trained), None)
    return Row(config.model.kind, found)
