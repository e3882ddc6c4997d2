"""Next-item recommendation with a user's whole history as the unit of privacy."""

from pathlib import Path

import numpy as np

from dpx.data import Histories
from dpx.runs.experiment import Candidate, Comparison, Outcome, Plan, compares
from dpx.training import keys as secrets
from dpx.training import resuming, users
from experiments import checks
from experiments.dp_transformer import (
    choice,
    models,
    next_item,
    ranking,
    recommender_figures,
    recommender_plain,
    recommender_rows,
    training,
    warm_start,
)
from experiments.dp_transformer import histories as recommender_data

ASSUMPTIONS = (
    "the catalogue of items is public: which items there are, and their ids",
    "the number of users, which set the sampling probability, the batch size and δ, is public",
    users.ASSUMPTION,
)
NOT_COVERED = [
    "training loss and realised batch sizes (metrics.jsonl, config.log, the progress line)",
    "the rows of popularity and of the model without privacy, and how they were chosen",
    "the test metrics, at the end and in metrics.jsonl, which are computed on each user's held-out item",
    "choices of hyper-parameters made on the validation item",
]


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a value or a file that cannot be used."""
    checks.choice(config, "train.loss", ("last", "all"))
    checks.share(config, "popularity_budget_fraction", budget=True)
    checks.integers(config, "data.max_length")
    checks.integers(config, "train.evaluate_every", least=0)
    ranking.check(config)
    choice.check(config)
    histories = recommender_data.load(config)
    config = recommender_data.with_batch_size(config, histories)
    warm_start.check(config, histories.num_items)
    models.check(config, histories.num_items)
    # Of histories the last item is held out to choose, and no user.
    training.check_both(config, len(histories.items), parted=False)
    training.warn_about_delta(config.delta, len(histories.items))


def plan(config) -> Plan:
    """What a run will release, without training."""
    train = recommender_data.prepare(config).train
    config = recommender_data.with_batch_size(config, train)
    return recommender_rows.plan(config, len(train.items), ASSUMPTIONS)


def run(config, workdir: Path) -> Outcome:
    """Trains with and without privacy, and ranks all items for each user."""
    prepared = recommender_data.prepare(config)
    notes = _notes(config, prepared.train)
    config = recommender_data.with_batch_size(config, prepared.train)
    synthetic = config.data.kind == "synthetic"
    keys = secrets.open_keys(config, workdir, synthetic=synthetic, data=_begun(prepared))
    assumptions = ASSUMPTIONS + recommender_data.assumptions(config)
    exact = recommender_plain.best_popularity(config, prepared.train)
    results = [("popularity", recommender_rows.evaluate(config, prepared, lambda *_: exact))]
    releases, composed, chosen = {}, {}, None
    for number in range(config.num_seeds):
        repetition = recommender_rows.Repetition(
            config, workdir, prepared, assumptions, number, keys
        )
        popular = [recommender_rows.dp_popularity(repetition)] if compares(config) else []
        key = repetition.noise("prior")
        bias, start, prior = recommender_rows.prior(config, prepared.train, key)
        for row in (*popular, *recommender_rows.rows(repetition, bias, start, prior)):
            results.append((row.name, row.metrics))
            label = f"{row.name}{repetition.suffix}"
            releases[label] = row.guarantee
            if row.adds is not None:
                composed[label] = row.adds
            notes += f"\n\n{row.words}" if row.words and not number else ""
        if config.non_private.steps:
            chosen = chosen or recommender_plain.chosen(repetition)
            label = f"{config.model.kind}{repetition.suffix}"
            row = recommender_plain.row(repetition, chosen.way, label)
            results.append((row.name, row.metrics))
    if chosen is not None:
        notes += f"\n\nThe {config.model.kind} without privacy was trained {chosen.words}"
    main = _main_row(config, 0)
    return Outcome(
        measures=ranking.measures(results),
        headline=releases[main],
        releases=releases,
        composed=composed,
        synthetic=synthetic,
        not_covered=NOT_COVERED,
        notes=notes,
        titles=recommender_figures.LABELS,
        headline_row=main,
        comparisons=[
            Comparison(
                f"ndcg@{config.evaluate.k}",
                ["dp_popularity", "transitions"],
                dict.fromkeys(models.private_rows(config), "start"),
                more_is_better=True,
            )
        ],
    )


def _main_row(config, trained: int) -> str:
    """The row of what is chosen after training, or where nothing is, of that private model by number."""
    begun = config.start.budget_fraction or config.popularity_budget_fraction
    chosen = begun and config.choice_budget_fraction
    return "served" if chosen else models.private_rows(config)[trained]


def candidate(config) -> Candidate:
    """The private model that a run saves, and how far a user's held-out item changes its metrics."""
    if config.num_seeds != 1:
        raise ValueError(
            f"config.num_seeds={config.num_seeds} must be 1 in a selection, which scores one model at a "
            "time: add --config.num_seeds=1"
        )
    prepared = recommender_data.prepare(config)
    config = recommender_data.with_batch_size(config, prepared.train)
    public = ranking.ASSUMPTION, *ASSUMPTIONS, *recommender_data.assumptions(config)
    guarantee = recommender_rows.planned(config, prepared.train, public)
    return Candidate(
        row=_main_row(config, -1),
        guarantee=guarantee,
        sensitivities=ranking.sensitivities(config, len(prepared.next_items)),
        files=(next_item.CATALOGUE,),
        synthetic=config.data.kind == "synthetic",
        data=resuming.digest(_begun(prepared)),
    )


def _begun(prepared: recommender_data.Prepared) -> tuple[np.ndarray, ...]:
    """What a run that resumes has to find unchanged.

    How many items a start keeps follows from the size of the catalogue, and what is served, and the score of
    a selection, from the items that are held out.
    """
    begun = (*prepared.train.items, np.array(prepared.train.num_items))
    return (*begun, *prepared.seen, prepared.users, prepared.next_items)


load, figures = next_item.load, recommender_figures.draw


def _notes(config, train: Histories) -> str:
    notes = (
        f"{ranking.words(config)} Trained and released with {config.num_seeds} seed(s), each with releases "
        "of its own."
    )
    if config.train.batch_size is None:
        size = recommender_data.with_batch_size(config, train).train.batch_size
        notes += f" The batch size follows from the number of users: {size}."
    return notes
