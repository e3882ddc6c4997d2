"""Next-item recommendation with a user's whole history as the unit of privacy."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx import privacy
from dpx.data import Histories, left_pad
from dpx.launch.experiment import Outcome, measures
from dpx.reattention import ParameterNoise
from dpx.recommend import metrics as ranking
from dpx.recommend import popularity
from dpx.training import keys as secrets
from dpx.training import loop as training
from experiments.dp_transformer import histories as recommender_data
from experiments.dp_transformer import models, recommender_figures, warm_start

UNIT = "user"
ASSUMPTIONS = (
    "the catalogue of items is public",
    "the number of users, which set the sampling probability, the batch size and δ, is public",
)
NOT_COVERED = [
    "training loss and realised batch sizes (metrics.jsonl, the progress line)",
    "the rows of popularity and of the model without privacy",
    "the test metrics, at the end and in metrics.jsonl, which are computed on each user's held-out item",
    "choices of hyper-parameters made on the validation item",
]


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a value or a file that cannot be used."""
    if config.train.loss not in ("last", "all"):
        raise ValueError(f"config.train.loss={config.train.loss!r} must be 'last' or 'all'")
    if config.evaluate.split not in ("test", "validation"):
        raise ValueError(
            f"config.evaluate.split={config.evaluate.split!r} must be 'test' or 'validation'"
        )
    if not 0 <= config.popularity_budget_fraction < 1:
        raise ValueError(
            f"config.popularity_budget_fraction={config.popularity_budget_fraction} must be in [0, 1)"
        )
    if config.data.max_length < 1 or config.num_seeds < 1 or config.evaluate.k < 1:
        raise ValueError("config.data.max_length, num_seeds and evaluate.k must be at least 1")
    histories = recommender_data.load(config)
    num_users = len(histories.items)
    models.check(config, histories.num_items)
    warm_start.check(config)
    training.check_both(config, num_users)
    if config.train.evaluate_every < 0:
        raise ValueError(
            f"config.train.evaluate_every={config.train.evaluate_every} must be at least 0"
        )
    training.warn_about_delta(config.delta, num_users)


def plan(config) -> dict:
    """The privacy parameters of a run, without training."""
    _, start, prior = _prior(config, recommender_data.prepare(config).train, jax.random.key(0))
    prepared = recommender_data.prepare(config, start)
    planned = training.plan(
        config.train, config.epsilon, config.delta, len(prepared.inputs), beside=prior
    )
    about = (prepared.records, config.data.max_length, UNIT, ASSUMPTIONS)
    return (
        planned
        | models.plan(config, *about, prior=prior)
        | {
            "items": prepared.train.num_items,
            "popularity_budget_fraction": config.popularity_budget_fraction,
            "start_budget_fraction": config.start.budget_fraction,
        }
    )


def run(config, workdir: Path) -> Outcome:
    """Trains with and without privacy, and ranks all items for each user."""
    prepared = recommender_data.prepare(config)
    synthetic = config.data.kind == "synthetic"
    keys = secrets.open_keys(config, workdir, synthetic=synthetic, data=prepared.train.items)
    assumptions = ASSUMPTIONS + recommender_data.assumptions(config)
    scores, releases, once = {}, {}, {}

    exact = np.log1p(popularity.count(prepared.train))
    scores["popularity"] = [_evaluate(config, prepared, lambda *_: exact)]
    rows = models.private_rows(config)
    released = ("transitions", "start") if config.start.budget_fraction else ()
    for row in ("dp_popularity", *released, *rows, config.model.kind):
        scores[row] = []
    for number in range(config.num_seeds):
        seed = config.seed + number
        # A key of its own for each release: noise that two of them share would cancel.
        noise = jax.random.split(jax.random.fold_in(keys.noise, number), 7)
        sampling = np.random.SeedSequence(
            keys.sampling.entropy, spawn_key=(*keys.sampling.spawn_key, number)
        )
        suffix = f"_seed{seed}" if number else ""
        noisy = popularity.fit(
            noise[0],
            prepared.train,
            epsilon=config.epsilon,
            delta=config.delta,
        )
        releases[f"dp_popularity{suffix}"] = noisy.guarantee.assuming(*assumptions)
        alone = noisy.log_probabilities()
        scores["dp_popularity"].append(_evaluate(config, prepared, lambda *_, s=alone: s))
        bias, start, prior = _prior(config, prepared.train, noise[1])
        if prior is not None:
            once[f"prior{suffix}"] = prior.assuming(*assumptions)
        tokenized = prepared
        if start is not None:
            whole, guarantee = warm_start.fit(noise[5], prepared.train, config, budget_fraction=1.0)
            releases[f"transitions{suffix}"] = guarantee.assuming(*assumptions)
            # Each release keeps items of its own, which are its tokens.
            of_whole = recommender_data.prepare(config, whole)
            scores["transitions"].append(_evaluate(config, of_whole, _start_scorer(whole)))
            tokenized = recommender_data.prepare(config, start)
            scores["start"].append(_evaluate(config, tokenized, _start_scorer(start)))
        graph, params = _build(config, tokenized.records.num_items, seed, bias, start)
        last_only = config.train.loss == "last"
        fit = functools.partial(
            training.train,
            data=tokenized[2:6],
            workdir=workdir,
        )
        # Rows that are all released share neither noise nor samples.
        noise_keys = (noise[2], noise[4])
        *samplings, plain_sampling = (sampling, *sampling.spawn(2))
        for row, key, own in zip(rows, noise_keys, samplings, strict=False):
            corrected = row == "dp_reattention"
            calibrated = models.calibrate(
                config,
                tokenized.records,
                config.data.max_length,
                UNIT,
                assumptions,
                prior=prior,
                correction_key=noise[3] if corrected else None,
            )
            score = _scorer(graph, calibrated.errors, start)
            evaluate = functools.partial(_evaluate_model, config, tokenized, score)
            trained = fit(
                functools.partial(_loss, graph, calibrated.errors, start, last_only),
                params,
                config=config.train,
                keys=secrets.Keys(key, own),
                label=f"{row}{suffix}",
                privacy=calibrated.privacy,
                evaluate=evaluate if config.train.evaluate_every else None,
            )
            releases[f"{row}{suffix}"] = calibrated.guarantee
            once[f"{row}{suffix}"] = calibrated.alone
            if not number:
                models.save(workdir, trained, calibrated.errors, **_saved(start))
            scores[row].append(evaluate(trained))
        if config.non_private.steps:
            bias = exact if start is None else None
            graph, params = _build(config, tokenized.records.num_items, seed, bias, start)
            trained = fit(
                functools.partial(_loss, graph, None, start, last_only),
                params,
                config=training.without_privacy(config),
                keys=secrets.Keys(noise[6], plain_sampling),
                label=f"{config.model.kind}{suffix}",
                privacy=None,
            )
            score = _scorer(graph, None, start)
            scores[config.model.kind].append(_evaluate_model(config, tokenized, score, trained))
    return Outcome(
        measures=measures(means(scores)),
        headline=releases[rows[0]],
        releases=releases,
        composed=releases | once,
        synthetic=synthetic,
        not_covered=NOT_COVERED,
        notes=_notes(config),
    )


def load(config, workdir: Path) -> "PrivateRecommender":
    """The private model that a run left (of its first seed)."""
    histories, start = recommender_data.load(config), None
    num_tokens = histories.num_items
    if config.start.budget_fraction:
        start = warm_start.template(config, histories)
        num_tokens = len(start.items)
    graph, params = _build(config, num_tokens, config.seed, None, None)
    params, errors, *saved = models.load(config, workdir, params, num_tokens, **_saved(start))
    if start is not None:
        start = warm_start.Start(**saved[0])
    return PrivateRecommender(graph, params, errors, start, histories.num_items, config)


class PrivateRecommender:
    """The private model: recommends items to follow a history."""

    def __init__(self, graph, params, errors: ParameterNoise | None, start, num_items, config):
        self._score = functools.partial(_scorer(graph, errors, start), params)
        self._start, self._num_items = start, num_items
        self._max_length = config.data.max_length

    def recommend(self, history, k: int = 10, *, exclude_seen: bool) -> list[int]:
        """The k items that score highest after a history of item ids, the best first."""
        known = Histories((np.asarray(history, np.int32),), self._num_items)
        if self._start is not None:
            known = self._start.restrict(known)
        tokens, mask = left_pad(known.items, self._max_length)
        scores = np.array(self._score(tokens, mask)[0])
        if exclude_seen:
            scores[np.asarray(history, np.int64)] = -np.inf
        return np.argsort(-scores, kind="stable")[:k].tolist()


def _prior(
    config, train: Histories, key: jax.Array
) -> tuple[np.ndarray | None, warm_start.Start | None, privacy.PrivacyGuarantee | None]:
    """The output bias, or the start, that a share of the budget pays for, and its guarantee."""
    if config.start.budget_fraction:
        return None, *warm_start.fit(key, train, config, config.start.budget_fraction)
    if config.popularity_budget_fraction == 0:
        return None, None, None
    noisy = popularity.fit(
        key, train, epsilon=config.popularity_budget_fraction * config.epsilon, delta=config.delta
    )
    return noisy.log_probabilities(), None, noisy.guarantee


def _build(config, num_tokens: int, seed: int, bias, start: warm_start.Start | None):
    model = models.build(config, num_tokens, config.data.max_length, seed)
    if start is not None:
        model.embed.embedding[...] = config.model.embed_std * jnp.asarray(start.embeddings)
        # The logits begin as the start's, whatever the embeddings are.
        model.norm.scale = nnx.Param(jnp.zeros(config.model.dim))
    if bias is not None:
        model.output_bias[...] = jnp.asarray(bias - np.max(bias), jnp.float32)
    return nnx.split(model)


def _logits(graph, errors, start, params, tokens, mask, last_only, dropout_key=None):
    """(L, T), or (1, T) with `last_only`, of the T tokens; leading axes are kept."""
    correction = {} if errors is None else {"errors": errors}
    logits = nnx.merge(graph, params)(
        tokens, mask=mask, last_only=last_only, dropout_key=dropout_key, **correction
    )
    return logits if start is None else logits + start.logits(tokens, mask, last_only)


def _loss(graph, errors, start, last_only, params, inputs, targets, input_mask, target_mask, key):
    """Mean cross-entropy over one user's targets; zero for a user without any."""
    logits = _logits(graph, errors, start, params, inputs, input_mask, last_only, key)
    if last_only:
        targets, target_mask = targets[-1:], target_mask[-1:]
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(log_probs, targets[:, None], axis=1)[:, 0]
    return -jnp.where(target_mask, picked, 0).sum() / jnp.maximum(target_mask.sum(), 1)


def _scorer(graph, errors, start):
    @jax.jit
    def score(params, histories, mask):
        logits = _logits(graph, errors, start, params, histories, mask, True)[:, 0]
        return logits if start is None else start.widen(logits)

    return score


def _start_scorer(start: warm_start.Start):
    return jax.jit(lambda tokens, mask: start.widen(start.logits(tokens, mask, True)[:, 0]))


def _saved(start: warm_start.Start | None) -> dict:
    """What is saved beside the parameters."""
    return {} if start is None else {"start": start._asdict()}


def _evaluate(config, prepared: recommender_data.Prepared, score) -> dict[str, float]:
    """NDCG@k and HIT@k over all evaluated users, every item ranked."""
    k, ranks = config.evaluate.k, []
    for start in range(0, len(prepared.next_items), 512):
        rows = slice(start, start + 512)
        own = score(prepared.histories[rows], prepared.history_mask[rows])
        wide = jnp.broadcast_to(jnp.asarray(own), (len(prepared.seen[rows]), np.shape(own)[-1]))
        exclude = jnp.asarray(prepared.seen[rows]) if config.evaluate.exclude_seen else None
        ranks.append(
            ranking.target_ranks(wide, jnp.asarray(prepared.next_items[rows]), exclude=exclude)
        )
    ranks = jnp.concatenate(ranks)
    return {
        f"ndcg@{k}": float(ranking.ndcg(ranks, k)),
        f"hit@{k}": float(ranking.hit_rate(ranks, k)),
    }


def _evaluate_model(config, prepared, score, params) -> dict[str, float]:
    return _evaluate(config, prepared, functools.partial(score, params))


def figures(records, folder: Path) -> list[Path]:
    """Rows against ε, during training, over a grid, and with or without a shared embedding."""
    return recommender_figures.draw(records, folder)


def means(scores: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """`row/metric` and, over several seeds, the standard error `row/metric_se`."""
    metrics = {}
    for row, runs in scores.items():
        for name in runs[0] if runs else ():
            values = [run[name] for run in runs]
            metrics[f"{row}/{name}"] = np.mean(values)
            if len(values) > 1:
                metrics[f"{row}/{name}_se"] = np.std(values, ddof=1) / np.sqrt(len(values))
    return metrics


def _notes(config) -> str:
    seen = "left out of" if config.evaluate.exclude_seen else "part of"
    return (
        f"All items are ranked; those that a user has seen are {seen} the ranking. "
        f"Trained and released with {config.num_seeds} seed(s), each with releases of its own. "
        f"Evaluated on the {config.evaluate.split} item."
    )
