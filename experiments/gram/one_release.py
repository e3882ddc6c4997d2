"""Recommending from one private release, without training: transitions, item Gram to EASE or attention."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx import privacy
from dpx.data import Histories, leave_last_out
from dpx.recommend import item_gram, popularity, transitions
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan
from dpx.training import keys as secrets
from dpx.training import users
from experiments import checks, guarantees
from experiments.dp_transformer import histories as recommender_data
from experiments.dp_transformer import ranking, recommender_plain

ROWS = {
    "transitions": "transitions",
    "transitions_one_round": "transitions, one round",
    "ease": "EASE",
    "attention": "item attention",
    "ease_fixed": "EASE, fixed K and λ",
    "dp_popularity": "DP popularity",
    "popularity": "popularity, no privacy",
}


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a value or a file that cannot be used."""
    ranking.check(config)
    checks.share(config, "popularity_budget_fraction", "fixed.popularity_budget_fraction")
    checks.positive(config, "regularization", "fixed.regularization")
    transitions.check_options(**config.transitions)
    num_items = recommender_data.load(config).num_items
    for prefix, kept in (("", config.num_kept), ("fixed.", config.fixed.num_kept)):
        if kept is not None and not 2 <= kept <= num_items:
            raise ValueError(
                f"config.{prefix}num_kept={kept} must be in [2, {num_items}], the items there are"
            )


def plan(config) -> Plan:
    """What a run will release, and what the rules choose from ε and N alone."""
    histories = recommender_data.load(config)
    multiplier = privacy.gaussian_noise_multiplier(config.epsilon, config.delta)
    std = multiplier / np.sqrt(1 - config.popularity_budget_fraction)
    kept = config.num_kept or popularity.default_num_kept(
        std, len(histories.items), histories.num_items
    )
    parameters = {
        "users": len(histories.items),
        "items": histories.num_items,
        "noise_multiplier": multiplier,
        "gram_noise_std": std,
        "num_kept": kept,
        "regularization": config.regularization or item_gram.default_regularization(std, kept),
        "ease_fixed_epsilon": fixed_budget(config)["epsilon"],
    }

    def spent(epsilon: float, delta: float, **_) -> privacy.PrivacyGuarantee:
        return guarantees.gaussian(epsilon, delta, "one release", "user")

    whole = ("dp_popularity", "transitions", "transitions_one_round", "ease")
    once: dict[str, Any] = dict.fromkeys(whole, spent(config.epsilon, config.delta))
    if config.fixed.num_kept is not None:
        once["ease_fixed"] = spent(**fixed_budget(config))
    suffixes = ["", *(f"_seed{number}" for number in range(1, config.num_seeds))]
    releases = {f"{row}{suffix}": x for suffix in suffixes for row, x in once.items()}
    return Plan(releases, parameters)


def fixed_budget(config) -> dict[str, Any]:
    """What the row ease_fixed spends, as arguments of `dpx.recommend.item_gram.fit`.

    It splits the budget by basic composition: a share of ε and half of δ for the popularity, the rest for
    the Gram matrix. Both are Gaussian mechanisms, and together cost less than the (ε, δ) they add up to.
    """
    share, half = config.fixed.popularity_budget_fraction, config.delta / 2
    first = privacy.gaussian_noise_multiplier(share * config.epsilon, half)
    second = privacy.gaussian_noise_multiplier((1 - share) * config.epsilon, half)
    together = (first**-2 + second**-2) ** -0.5
    epsilon, delta = privacy.gaussian_budget(together, config.delta)
    return {
        "epsilon": epsilon,
        "delta": delta,
        "popularity_budget_fraction": (together / first) ** 2,
    }


class Evaluated(NamedTuple):
    """What is known of the users, and what came next."""

    known: Histories
    users: np.ndarray  # (U,) those that are evaluated
    next_items: np.ndarray  # (U,)


class Row(NamedTuple):
    """A row of the table, with the guarantee of the release that it reads."""

    name: str
    metrics: dict[str, float]
    guarantee: privacy.PrivacyGuarantee
    chosen: Mapping[str, float] = MappingProxyType({})  # by rules, for this row


def run(config, workdir: Path) -> Outcome:
    """Releases, and ranks all items for each user whose next item is held out."""
    evaluated = _evaluated(config)
    # How many items are kept follows from the size of the catalogue.
    begun = (*evaluated.known.items, np.array(evaluated.known.num_items))
    keys = secrets.open_keys(config, workdir, data=begun)
    assumed = users.ASSUMPTION, *recommender_data.assumptions(config)
    exact = recommender_plain.best_popularity(config, evaluated.known)
    results = [("popularity", _rank(config, evaluated, lambda _: exact[None]))]
    releases, chosen = {}, []
    for number in range(config.num_seeds):
        suffix = f"_seed{number}" if number else ""
        noise = lambda row, suffix=suffix: keys.noise(f"{row}{suffix}")  # noqa: E731
        rows = list(_rows(config, evaluated, noise))
        results += [(row.name, row.metrics) for row in rows]
        for row in rows:
            releases[row.name + suffix] = row.guarantee.assuming(*assumed)
        chosen = [Measure(row.name, name, x) for row in rows for name, x in row.chosen.items()]
    results.sort(key=lambda result: list(ROWS).index(result[0]))
    # The rows ease and attention read one release, which counts once.
    composed = {label: x for label, x in releases.items() if not label.startswith("attention")}
    return Outcome(
        measures=ranking.measures(results) + chosen,
        headline=releases["transitions"],
        releases=releases,
        composed=composed,
        not_covered=[
            "the row popularity, which is not private",
            "the test metrics, which are computed on each user's held-out item",
            "the constants of the rules for K and λ, and the weights of transitions, chosen on this data's "
            "next-to-last items",
            "the constants of ease_fixed, chosen on this data's last items",
        ],
        notes=f"{ranking.words(config)} Means over {config.num_seeds} release(s), each of which costs the "
        "whole budget.",
        titles=ROWS,
        headline_row="transitions",
        comparisons=[
            Comparison(f"ndcg@{config.evaluate.k}", ["dp_popularity"], more_is_better=True)
        ],
    )


def _rows(config, evaluated: Evaluated, noise: Callable[[str], jax.Array]) -> Iterator[Row]:
    """The rows of a repetition in their order; `noise` returns the key of a release by its name."""
    yield _dp_popularity(config, evaluated, noise("dp_popularity"))
    yield _transitions(config, evaluated, noise("transitions"), "transitions")
    # Here the order takes of the norm of all pairs, and not only of those that are left.
    alone = {"rounds": 1, "order_weight": min(0.4, config.transitions.order_weight)}
    one_round = "transitions_one_round"
    yield _transitions(config, evaluated, noise(one_round), one_round, **alone)
    yield from _ease_and_attention(config, evaluated, noise("ease"))
    if config.fixed.num_kept is not None:
        yield _ease_fixed(config, evaluated, noise("ease_fixed"))


def _dp_popularity(config, evaluated: Evaluated, key: jax.Array) -> Row:
    budget = {"epsilon": config.epsilon, "delta": config.delta}
    decay = config.popularity_age_decay
    noisy = popularity.fit(key, evaluated.known, age_decay=decay, **budget)
    scores = noisy.log_probabilities()[None]
    return Row("dp_popularity", _rank(config, evaluated, lambda _: scores), noisy.guarantee)


def _transitions(config, evaluated: Evaluated, key: jax.Array, name: str, **changed) -> Row:
    options = {**config.transitions.to_dict(), "num_kept": config.num_kept, **changed}
    release = transitions.fit(
        key, evaluated.known, **options, epsilon=config.epsilon, delta=config.delta
    )
    found = _rank(config, evaluated, lambda users: release.scores(users.items))
    chosen = {"num_kept": len(release.items)} if name == "transitions" else {}
    return Row(name, found, release.guarantee, chosen)


def _ease_and_attention(config, evaluated: Evaluated, key: jax.Array) -> Iterator[Row]:
    """Two rows that read one release of the Gram matrix."""
    release = item_gram.fit(
        key,
        evaluated.known,
        num_kept=config.num_kept,
        popularity_budget_fraction=config.popularity_budget_fraction,
        epsilon=config.epsilon,
        delta=config.delta,
    )
    std, kept = release.noise_std, len(release.items)
    strength = config.regularization or item_gram.default_regularization(std, kept)
    score = _scorer(release, item_gram.ease(release.matrix, strength), std / strength)
    chosen = {"num_kept": kept, "regularization": strength}
    yield Row("ease", _rank(config, evaluated, score), release.guarantee, chosen)
    weights = item_gram.item_attention(release.matrix, max(1.0, 2 * std))
    score = _scorer(release, weights, config.attention_prior_weight)
    yield Row("attention", _rank(config, evaluated, score), release.guarantee)


def _ease_fixed(config, evaluated: Evaluated, key: jax.Array) -> Row:
    fixed = config.fixed
    release = item_gram.fit(key, evaluated.known, num_kept=fixed.num_kept, **fixed_budget(config))
    weights = item_gram.ease(release.matrix, fixed.regularization)
    score = _scorer(release, weights, fixed.prior_weight)
    return Row("ease_fixed", _rank(config, evaluated, score), release.guarantee)


def _evaluated(config) -> Evaluated:
    split = leave_last_out(recommender_data.load(config))
    testing = config.evaluate.split == "test"
    known = split.train_and_validation if testing else split.train
    return Evaluated(known, split.users, split.test if testing else split.validation)


def _rank(config, evaluated: Evaluated, score) -> dict[str, float]:
    """NDCG@k and HIT@k of the scores that histories get."""

    def of_users(rows: np.ndarray):
        items = tuple(evaluated.known.items[user] for user in evaluated.users[rows])
        return jnp.asarray(score(Histories(items, evaluated.known.num_items)), jnp.float32)

    seen = [evaluated.known.items[user] for user in evaluated.users]
    return ranking.evaluate(config, seen, evaluated.next_items, of_users)


def _scorer(release, weights, prior_weight: float):
    def score(users: Histories):
        vectors = item_gram.user_vectors(users)
        return item_gram.scores(release, weights, vectors, prior_weight=prior_weight)

    return score
