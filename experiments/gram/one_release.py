"""Recommending from one private release, without training: transitions, item Gram to EASE or attention."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx import privacy
from dpx.data import Histories, leave_last_out, left_pad
from dpx.launch import plotting
from dpx.launch.experiment import Outcome, measures
from dpx.recommend import item_gram, popularity, transitions
from dpx.recommend import metrics as ranking
from dpx.training import keys as secrets
from experiments.dp_transformer import histories as recommender_data
from experiments.dp_transformer.recommender import means

ROWS = {
    "transitions": "transitions, in rounds",
    "transitions_one_round": "transitions, in one round",
    "ease": "Gram → EASE, K and λ from ε and N",
    "attention": "Gram → attention",
    "ease_fixed": "Gram → EASE, fixed K and λ",
    "dp_popularity": "DP popularity",
    "popularity": "popularity, not private",
}


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a value or a file that cannot be used."""
    if config.num_seeds < 1 or config.evaluate.k < 1:
        raise ValueError("config.num_seeds and config.evaluate.k must be at least 1")
    if config.evaluate.split not in ("test", "validation"):
        raise ValueError(
            f"config.evaluate.split={config.evaluate.split!r} must be 'test' or 'validation'"
        )
    sections = (("", config), ("fixed.", config.fixed))
    for prefix, section in sections:
        if not 0 < section.popularity_budget_fraction < 1:
            raise ValueError(
                f"config.{prefix}popularity_budget_fraction={section.popularity_budget_fraction} must be "
                "strictly between 0 and 1"
            )
    transitions.check_options(**config.transitions)
    num_items = recommender_data.load(config).num_items
    for prefix, section in sections:
        kept = section.num_kept
        if kept is not None and not 2 <= kept <= num_items:
            raise ValueError(
                f"config.{prefix}num_kept={kept} must be in [2, {num_items}], the items there are"
            )
    if config.regularization is not None and not config.regularization > 0:
        raise ValueError(f"config.regularization={config.regularization} must be positive")


def plan(config) -> dict:
    """What the rules choose from ε and N alone."""
    histories = recommender_data.load(config)
    multiplier = privacy.gaussian_noise_multiplier(config.epsilon, config.delta)
    std = multiplier / np.sqrt(1 - config.popularity_budget_fraction)
    kept = config.num_kept or popularity.default_num_kept(
        std, len(histories.items), histories.num_items
    )
    return {
        "users": len(histories.items),
        "items": histories.num_items,
        "noise_multiplier": multiplier,
        "gram_noise_std": std,
        "num_kept": kept,
        "regularization": config.regularization or item_gram.default_regularization(std, kept),
        "ease_fixed_epsilon": fixed_budget(config)["epsilon"],
    }


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


def run(config, workdir: Path) -> Outcome:
    """Releases, and ranks all items for each user whose next item is held out."""
    split = leave_last_out(recommender_data.load(config))
    testing = config.evaluate.split == "test"
    known = split.train_and_validation if testing else split.train
    rank = functools.partial(
        _rank, config, known, split.users, split.test if testing else split.validation
    )
    noise = secrets.open_keys(config, workdir, data=known.items).noise
    budget = {"epsilon": config.epsilon, "delta": config.delta}
    scores, guarantees = {row: [] for row in ROWS}, {}

    exact = np.log1p(popularity.count(known))
    scores["popularity"].append(rank(lambda _: exact[None]))
    for number in range(config.num_seeds):
        keys = jax.random.split(jax.random.fold_in(noise, number), 5)
        suffix = f"_seed{number}" if number else ""
        prior = popularity.fit(keys[0], known, **budget)
        guarantees["dp_popularity" + suffix] = prior.guarantee
        biases = prior.log_probabilities()
        scores["dp_popularity"].append(rank(lambda _, b=biases: b[None]))

        options = {"num_kept": config.num_kept, **config.transitions.to_dict()}
        for row, key, changed in (
            ("transitions", keys[3], {}),
            ("transitions_one_round", keys[4], {"rounds": 1}),
        ):
            follows = transitions.fit(key, known, **options | changed, **budget)
            guarantees[row + suffix] = follows.guarantee
            scores[row].append(rank(lambda users, r=follows: r.scores(users.items)))

        release = item_gram.fit(
            keys[1],
            known,
            num_kept=config.num_kept,
            popularity_budget_fraction=config.popularity_budget_fraction,
            **budget,
        )
        guarantees["ease" + suffix] = release.guarantee
        std, kept = release.noise_std, len(release.items)
        strength = config.regularization or item_gram.default_regularization(std, kept)
        weights = item_gram.ease(release.matrix, strength)
        scores["ease"].append(rank(_scorer(release, weights, std / strength)))
        weights = item_gram.item_attention(release.matrix, max(1.0, 2 * std))
        scores["attention"].append(rank(_scorer(release, weights, config.attention_prior_weight)))

        if config.fixed.num_kept is not None:
            fixed = item_gram.fit(
                keys[2], known, num_kept=config.fixed.num_kept, **fixed_budget(config)
            )
            guarantees["ease_fixed" + suffix] = fixed.guarantee
            weights = item_gram.ease(fixed.matrix, config.fixed.regularization)
            score = _scorer(fixed, weights, config.fixed.prior_weight)
            scores["ease_fixed"].append(rank(score))
    filtered = recommender_data.assumptions(config)
    guarantees = {label: spent.assuming(*filtered) for label, spent in guarantees.items()}
    return Outcome(
        measures=measures(
            means(scores)
            | {
                "transitions/num_kept": len(follows.items),
                "ease/num_kept": kept,
                "ease/regularization": strength,
            }
        ),
        headline=guarantees["transitions"],
        releases=guarantees,
        not_covered=[
            "the row popularity, which is not private",
            "the test metrics, which are computed on each user's held-out item",
            "the constants of the rules for K and λ, and the weights of transitions, chosen on this data's "
            "next-to-last items",
            "the constants of ease_fixed, chosen on this data's last items",
        ],
        notes=_notes(config),
    )


def _scorer(release, weights, prior_weight: float):
    def score(users: Histories):
        vectors = item_gram.user_vectors(users)
        return item_gram.scores(release, weights, vectors, prior_weight=prior_weight)

    return score


def _rank(config, known: Histories, users, next_items, score) -> dict[str, float]:
    """NDCG@k and HIT@k, every item of the catalogue ranked."""
    k, ranks = config.evaluate.k, []
    for start in range(0, len(users), 1024):
        rows = slice(start, start + 1024)
        seen = tuple(known.items[user] for user in users[rows])
        exclude = None
        if config.evaluate.exclude_seen:
            tokens, real = left_pad(seen, max(len(items) for items in seen))
            exclude = jnp.asarray(np.where(real, tokens, -1))
        own = jnp.asarray(score(Histories(seen, known.num_items)), jnp.float32)
        ranks.append(_target_ranks(own, jnp.asarray(next_items[rows]), exclude))
    ranks = jnp.concatenate(ranks)
    return {
        f"ndcg@{k}": float(ranking.ndcg(ranks, k)),
        f"hit@{k}": float(ranking.hit_rate(ranks, k)),
    }


@jax.jit
def _target_ranks(scores, target, exclude):
    # One row of scores serves all users where they do not depend on the history.
    wide = jnp.broadcast_to(scores, (target.shape[0], scores.shape[1]))
    return ranking.target_ranks(wide, target, exclude=exclude)


def _notes(config) -> str:
    seen = "left out of" if config.evaluate.exclude_seen else "part of"
    return (
        f"All items are ranked; those that a user has seen are {seen} the ranking. Means over "
        f"{config.num_seeds} release(s), each of which costs the whole budget; evaluated on the "
        f"{config.evaluate.split} item."
    )


def figures(records, folder: Path) -> list[Path]:
    """NDCG and HIT against ε, and against K where that was swept."""
    paths = []
    for axis, words in (("epsilon", "ε"), ("num_kept", "K, items kept")):
        other = "num_kept" if axis == "epsilon" else "epsilon"
        for fixed in sorted({r.config[other] for r in records}, key=str):
            line = [r for r in records if r.config[other] == fixed and r.config[axis] is not None]
            if len({r.config[axis] for r in line}) < 2:
                continue
            suffix = "" if fixed is None else f"_{other}_{fixed:g}"
            path = folder / f"item_recommender_{axis}{suffix}.png"
            paths.append(_draw(sorted(line, key=lambda r: r.config[axis]), axis, words, path))
    return paths


def _draw(records, axis: str, words: str, path: Path) -> Path:
    plt = plotting.pyplot()
    k = records[0].config["evaluate"]["k"]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for panel, name in zip(panels, (f"ndcg@{k}", f"hit@{k}"), strict=True):
        for row, label in ROWS.items():
            found = [r for r in records if f"{row}/{name}" in r.metrics]
            x = [r.config[axis] for r in found]
            y = [100 * r.metrics[f"{row}/{name}"] for r in found]
            bar = [100 * r.metrics.get(f"{row}/{name}_se", 0.0) for r in found]
            panel.errorbar(x, y, yerr=bar, marker="o", markersize=3, label=label)
        panel.set(xscale="log", xlabel=words, ylabel=f"{name.upper()} in %")
    panels[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return plotting.save(figure, path)
