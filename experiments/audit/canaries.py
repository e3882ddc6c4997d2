"""Audited lower bounds on ε beside the claim, and the bounds where a fault is planted."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from dpx import audit, ngram, privacy
from dpx.runs.experiment import Measure, Outcome, Plan
from dpx.training import keys as secrets
from experiments import checks, guarantees, lines
from experiments.audit import regression, whole
from experiments.audit.training_faults import FAULTS
from experiments.dp_transformer import histories as recommender_data
from experiments.dp_transformer import models, next_item, training

RELEASE = "one run of what is audited"
TITLES = {
    "white_box": "white box, many runs",
    "white_box_steps": "white box, many runs, noise of each step",
    "white_box_any_mechanism": "white box, many runs, without a model",
    "white_box_crowd": "white box, many runs, all others against the canary",
    "final_model": "final model, many runs",
    "input_canary": "input canary, white box, many runs",
    "input_canary_final": "input canary, final model, many runs",
    "one_run": "white box, one run",
    "one_run_any_mechanism": "white box, one run, without a model",
    "one_run_whole_training": "final model of dpx.training.loop, one run",
    "ngram": "n-gram probabilities, many runs",
    "fit_poisson": "dpx.training.fit, white box, Poisson samples",
    "fit_allocation": "dpx.training.fit, white box, random allocation",
    "fit_users": "dpx.training.fit, white box, users in Poisson samples",
    "fit_users_allocation": "dpx.training.fit, white box, users by random allocation",
    "fit_secure": "dpx.training.fit, white box, users by random allocation, secure=True",
}
PLANTED = {f"fault_{name}": "planted: " + name.replace("_", " ") for name in FAULTS}


def validate(config) -> None:
    """Raises ValueError for a value that cannot be used."""
    checks.choice(config, "target", _TARGETS)
    # With every record in every batch, no step lacks the canary.
    checks.share(config, "confidence", "sampling_probability")
    checks.integers(config, "steps")
    for name in ("runs", "input_runs", "fault_runs", "canaries"):
        if config.get(name, 200) < 200:
            raise ValueError(
                f"config.{name}={config[name]} must be at least 200: fewer prove nothing"
            )
    checks.choice(config, "faults", FAULTS)
    if config.target == "recommender":
        histories = recommender_data.load(config)
        training.check(config.train, len(histories.items))


def plan(config) -> Plan:
    """One run of what is audited, and its noise."""
    if config.target == "ngram":
        budget = config.epsilon, config.delta
        spent = guarantees.gaussian(*budget, "n-gram counts", regression.UNIT)
        return Plan(
            {RELEASE: spent}, {"noise_multiplier": privacy.gaussian_noise_multiplier(*budget)}
        )
    if config.target == "recommender":
        keys = secrets.open_keys(config, Path(), synthetic=True)
        problem = _recommender_problem(config, keys)
        about = problem.settings, len(problem.dirac.data[0]), problem.private
        return Plan({RELEASE: problem.guarantee}, training.parameters(*about, config.epsilon))
    spent = regression.guarantee(config)
    settings = ("sampling_probability", "steps", "canaries")
    parameters = {"noise_multiplier": regression.multiplier(config, config.steps)}
    return Plan({RELEASE: spent}, parameters | {name: config[name] for name in settings})


def run(config, workdir: Path) -> Outcome:
    """Audits the target; bounds are at `config.delta` and hold with probability `config.confidence` each."""
    keys = secrets.open_keys(config, workdir, synthetic=True)
    guarantee, bounds = _TARGETS[config.target](config, keys, workdir)
    claim = guarantee.epsilon
    return Outcome(
        measures=[
            Measure(row, metric, value)
            for row, bound in bounds.items()
            for metric, value in (("claim", claim), ("bound", bound), ("share", bound / claim))
        ],
        headline=guarantee,
        releases={RELEASE: guarantee},
        synthetic=True,
        not_covered=["the bounds, for which synthetic data are released thousands of times"],
        notes=_notes(bounds, claim),
        titles=TITLES | PLANTED,
    )


def _notes(bounds: dict[str, float], claim: float) -> str:
    planted = [bound for row, bound in bounds.items() if row in PLANTED]
    if not planted:
        return f"The claim is ε = {claim:.4g}, and no bound may pass it."
    found = sum(bound > claim for bound in planted)
    return (
        f"The claim is ε = {claim:.4g}, and no bound but that of a planted fault may pass it. Of "
        f"{len(planted)} planted faults {found} were proven to cost more than claimed."
    )


# ---------------------------------------------------------------------------------------------------------
# A small regression, the recommender, and the n-grams that a language model starts from


def _train(config, keys: secrets.Keys, workdir: Path):
    del workdir
    return regression.audited(config, keys)


class _Problem(NamedTuple):
    """The recommender's loss with canaries, and how it is trained."""

    dirac: audit.Dirac
    settings: Any
    private: training.Privacy
    guarantee: privacy.PrivacyGuarantee


def _recommender_problem(config, keys: secrets.Keys) -> _Problem:
    prepared = recommender_data.prepare(config)
    model = models.build(config, prepared.records.num_items, config.data.max_length, config.seed)
    graph, params = nnx.split(model)
    loss_fn = functools.partial(next_item.loss, graph, None, None, config.train.loss == "last")
    seed = regression.seed(keys, "canaries of one run")
    coins = {"canaries": config.canaries, "seed": seed}
    dirac = audit.dirac(loss_fn, params, prepared[2:6], **coins)
    records = len(dirac.data[0])
    settings = config.train.copy_and_resolve_references()
    settings.batch_size = round(config.sampling_probability * records)
    private, guarantee = training.make_private(
        settings, config.epsilon, config.delta, records, regression.UNIT, ()
    )
    return _Problem(dirac, settings, private, guarantee)


def _recommender(config, keys: secrets.Keys, workdir: Path):
    dirac, settings, private, guarantee = _recommender_problem(config, keys)
    records = len(dirac.data[0])
    shared = {"delta": config.delta, "confidence": config.confidence}
    bounds = {}
    # The loss takes a key for dropout, of which a white box has no use.
    key = keys.noise("dropout of one run")
    one = audit.Training(
        lambda params, *example: dirac.loss_fn(params, *example, key),
        l2_clip_norm=private.l2_clip_norm,
        noise_multiplier=private.noise_multiplier,
        sampling_probability=settings.batch_size / records,
        steps=settings.steps,
        expected_batch_size=settings.batch_size,
        microbatch_size=settings.microbatch_size,
    )
    scores = audit.one_run(one, dirac, seed=regression.seed(keys, "one run"))
    bounds["one_run"] = audit.one_run_lower_bound(
        scores, dirac.included, model=one.model, **shared
    ).epsilon
    trained = training.train(
        dirac.loss_fn,
        dirac.params,
        dirac.data,
        settings,
        keys=keys,
        label="audit",
        workdir=workdir,
        privacy=private,
    )
    bounds["one_run_whole_training"] = audit.one_run_lower_bound(
        np.asarray(trained["canaries"]), dirac.included, model=one.model, **shared
    ).epsilon
    return guarantee, bounds


def _ngram(config, keys: secrets.Keys, workdir: Path):
    """Unigrams of two tokens: many of the second, so that the first's share shows its noisy count."""
    del workdir
    tokens = np.array([[0, 0]] * 100 + [[1, 1]] * 2000)
    canary = np.zeros((1, 2), int)
    release = functools.partial(
        ngram.fit,
        order=1,
        vocab_size=2,
        start=1,
        epsilon=config.epsilon,
        delta=config.delta,
        unit=regression.UNIT,
    )
    scores = []
    for side, records in (("with", np.concatenate([tokens, canary])), ("without", tokens)):
        found = jax.random.split(keys.noise(f"runs {side} the canary"), config.runs)
        mask = np.ones(records.shape, bool)
        scores.append([release(key, records, mask).probabilities[0, 0] for key in found])
    bound = audit.curve_lower_bound(
        np.array(scores[0]),
        np.array(scores[1]),
        config.delta,
        model=audit.SampledGaussian(),
        confidence=config.confidence,
        selection_fraction=regression.SELECTION,
    )
    guarantee = release(keys.noise("one run"), tokens, np.ones(tokens.shape, bool)).guarantee
    return guarantee, {"ngram": bound.epsilon}


def _fit(config, keys: secrets.Keys, workdir: Path):
    del workdir
    return whole.audited(config, keys)


_TARGETS = {"train": _train, "fit": _fit, "recommender": _recommender, "ngram": _ngram}


# ---------------------------------------------------------------------------------------------------------
# Figure


def figures(records, folder: Path) -> list[Path]:
    """Audited bound against claimed ε: no honest row above the diagonal, every planted fault above it.

    Bounds beyond six times the largest claim are drawn there.
    """
    highest = 6 * max(record.config["epsilon"] for record in records)
    points = []
    for record in records:
        claim = record.config["epsilon"]
        points.append(lines.Point(Measure("claim", "bound", claim), claim))
        for found in (m for m in record.measures if m.metric == "bound"):
            shown = Measure(found.row, "bound", float(np.clip(found.value, 1e-2, highest)))
            points.append(lines.Point(shown, claim, "planted" if found.row in PLANTED else ""))
    panel = lines.Panel(points, "claimed ε", "audited lower bound on ε")
    title, titles = "What audits prove of the claimed ε", {"claim": "the claim"} | TITLES | PLANTED
    return [lines.draw(folder / "audit.png", title, [panel], titles, dashed=("claim",))]
