"""Audited lower bounds on ε beside the claim, and the bounds where a fault is planted."""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import dpx
from dpx import audit, ngram, privacy
from dpx.launch import plotting
from dpx.launch.experiment import Outcome, measures
from dpx.training import keys as secrets
from experiments.audit.training_faults import FAULTS
from experiments.dp_transformer import histories as recommender_data
from experiments.dp_transformer import models, next_item, training

UNIT = "record"
OTHERS, FEATURES = 4, 16  # records beside the canary, and numbers in each
SELECTION = 0.1  # of the runs, on which tests are chosen
WORDS = {
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
}


class Problem(NamedTuple):
    """A regression, whose records are (x, y) with x (FEATURES,)."""

    params: dict
    data: tuple
    canary: tuple


def validate(config) -> None:
    """Raises ValueError for a value that cannot be used."""
    if config.target not in _TARGETS:
        raise ValueError(f"config.target={config.target!r} must be one of {tuple(_TARGETS)}")
    if not 0 < config.confidence < 1:
        raise ValueError(f"config.confidence={config.confidence} must be strictly between 0 and 1")
    for name in ("runs", "input_runs", "fault_runs", "canaries"):
        if config.get(name, 200) < 200:
            raise ValueError(
                f"config.{name}={config[name]} must be at least 200: fewer prove nothing"
            )
    if config.get("steps", 1) < 1:
        raise ValueError(f"config.steps={config.steps} must be at least 1")
    unknown = set(config.get("faults", ())) - set(FAULTS)
    if unknown:
        raise ValueError(f"config.faults has {sorted(unknown)}: use some of {', '.join(FAULTS)}")
    # With every record in every batch, no step lacks the canary.
    if not 0 < config.get("sampling_probability", 0.5) < 1:
        raise ValueError(
            f"config.sampling_probability={config.sampling_probability} must be strictly between 0 and 1"
        )
    if config.target == "recommender":
        histories = recommender_data.load(config)
        training.check(config.train, len(histories.items))


def plan(config) -> dict:
    """The noise of what is audited."""
    if config.target == "ngram":
        multiplier = privacy.gaussian_noise_multiplier(config.epsilon, config.delta)
        return {"noise_multiplier": multiplier, "runs": config.runs}
    steps = config.train.steps if config.target == "recommender" else config.steps
    return {
        "noise_multiplier": _multiplier(config, steps),
        "sampling_probability": config.sampling_probability,
        "steps": steps,
        "canaries": config.canaries,
    }


def run(config, workdir: Path) -> Outcome:
    """Audits the target; bounds are at `config.delta` and hold with probability `config.confidence` each."""
    keys = secrets.open_keys(config, workdir, synthetic=True)
    seed = int(keys.sampling.generate_state(1)[0])
    guarantee, bounds = _TARGETS[config.target](config, seed, workdir)
    metrics = {}
    for row, bound in bounds.items():
        metrics[f"{row}/claim"] = guarantee.epsilon
        metrics[f"{row}/bound"] = bound
        metrics[f"{row}/share"] = bound / guarantee.epsilon
    return Outcome(
        measures=measures(metrics),
        headline=guarantee,
        releases={"one run of what is audited": guarantee},
        not_covered=["the bounds, for which synthetic data are released thousands of times"],
        notes=_notes(bounds, guarantee.epsilon),
    )


def _notes(bounds: dict[str, float], claim: float) -> str:
    lines = [
        f"- {WORDS[row]}: at least {bound:.3g}" for row, bound in bounds.items() if row in WORDS
    ]
    lines.append(f"\nThe claim is ε = {claim:.4g}; no row above may pass it.")
    planted = {row: bound for row, bound in bounds.items() if row.startswith("fault_")}
    if planted:
        found = sum(bound > claim for bound in planted.values())
        lines.append(
            f"Of {len(planted)} planted faults {found} were proven to cost more than claimed."
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------
# A small regression


def _train(config, seed: int, workdir: Path):
    del workdir
    noise = _multiplier(config, config.steps)
    bounds = {}
    many, problem = _gradient_canary(config, noise)
    runs = audit.many_runs(many, *problem, runs=config.runs, seed=seed)
    shared = {"confidence": config.confidence, "selection_fraction": SELECTION}
    curve = functools.partial(
        audit.curve_lower_bound, delta=config.delta, model=many.model, **shared
    )
    inside, outside = runs.statistics(many)
    bounds["white_box"] = curve(inside, outside).epsilon
    bounds["white_box_steps"] = audit.step_lower_bound(
        runs.inside, runs.sampled, config.delta, confidence=config.confidence
    ).epsilon
    bounds["white_box_any_mechanism"] = audit.epsilon_lower_bound(
        inside[:, 0], outside[:, 0], config.delta, **shared
    ).epsilon
    bounds["final_model"] = curve(runs.final_inside, runs.final_outside).epsilon

    runs = audit.many_runs(many, *_crowd(problem), runs=config.input_runs, seed=seed + 1)
    bounds["white_box_crowd"] = curve(*runs.statistics(many)).epsilon
    plain, problem = _input_canary(config, noise)
    runs = audit.many_runs(plain, *problem, runs=config.input_runs, seed=seed + 2)
    bounds["input_canary"] = curve(*runs.statistics(plain)).epsilon
    bounds["input_canary_final"] = curve(runs.final_inside, runs.final_outside).epsilon

    start = _regression()
    dirac = audit.dirac(
        _squared_error, start.params, start.data, canaries=config.canaries, seed=seed
    )
    one = _training(
        config, noise, dirac.loss_fn, dirac.included.sum() + OTHERS, microbatch_size=250
    )
    scored = audit.one_run(one, dirac, seed=seed + 3), dirac.included, config.delta
    for row, model in (("one_run", one.model), ("one_run_any_mechanism", None)):
        bounds[row] = audit.one_run_lower_bound(
            *scored, model=model, confidence=config.confidence
        ).epsilon
    for number, name in enumerate(config.faults):
        bounds[f"fault_{name}"] = fault_bound(name, config, seed + 4 + number)
    guarantee = privacy.dpsgd_guarantee(
        noise,
        config.delta,
        sampling_probability=config.sampling_probability,
        steps=config.steps,
        unit=UNIT,
    )
    return guarantee, bounds


def fault_bound(name: str, config, seed: int) -> float:
    """The larger of the white-box bounds on ε of a training with a fault, each for half the risk."""
    claimed, problem = _gradient_canary(config, _multiplier(config, config.steps))
    planted = FAULTS[name](claimed)
    if name == "batches_of_fixed_size":
        problem = _crowd(problem)
    runs = audit.many_runs(planted, *problem, runs=config.fault_runs, seed=seed)
    confidence = (1 + config.confidence) / 2
    curve = audit.curve_lower_bound(
        *runs.statistics(planted), config.delta, model=planted.model, confidence=confidence
    )
    steps = audit.step_lower_bound(runs.inside, runs.sampled, config.delta, confidence=confidence)
    # Correlated steps are none of the model's: what they cost is left to the joint statistic.
    independent = steps.independence > (1 - config.confidence) / 2
    return max(curve.epsilon, steps.epsilon if independent else 0.0)


def _multiplier(config, steps: int) -> float:
    return dpx.calibrate_dpsgd(
        config.epsilon,
        config.delta,
        sampling_probability=config.sampling_probability,
        steps=steps,
    )


def _training(config, noise: float, loss_fn, records: int, **rest) -> audit.Training:
    return audit.Training(
        loss_fn,
        l2_clip_norm=1.0,
        noise_multiplier=noise,
        sampling_probability=config.sampling_probability,
        steps=config.steps,
        expected_batch_size=float(config.sampling_probability * records),
        **rest,
    )


def _squared_error(params, x, y):
    return 0.5 * (x @ params["weights"] + params["bias"] - y) ** 2


def _regression() -> Problem:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(OTHERS + 1, FEATURES)).astype(np.float32)
    y = rng.normal(size=OTHERS + 1).astype(np.float32)
    params = {"weights": jnp.zeros(FEATURES), "bias": jnp.zeros(())}
    # A large target: its gradient is clipped at every step.
    return Problem(params, (x[1:], y[1:]), (x[0], np.float32(100.0)))


def _input_canary(config, noise) -> tuple[audit.Training, Problem]:
    return _training(config, noise, _squared_error, OTHERS), _regression()


def _gradient_canary(config, noise) -> tuple[audit.Training, Problem]:
    params, data, canary = _regression()
    dirac = audit.dirac(_squared_error, params, data, canaries=1, seed=0)
    problem = Problem(dirac.params, (np.zeros(OTHERS, np.int32), *data), (np.int32(1), *canary))
    return _training(config, noise, dirac.loss_fn, OTHERS), problem


def _crowd(problem: Problem) -> Problem:
    """All other records are canaries too, against this one."""
    return problem._replace(data=(np.full(OTHERS, -1, np.int32), *problem.data[1:]))


# ---------------------------------------------------------------------------------------------------------
# The recommender, and the n-grams that a language model starts from


def _recommender(config, seed: int, workdir: Path):
    prepared = recommender_data.prepare(config)
    model = models.build(config, prepared.records.num_items, config.data.max_length, config.seed)
    graph, params = nnx.split(model)
    loss_fn = functools.partial(next_item.loss, graph, None, None, config.train.loss == "last")
    dirac = audit.dirac(loss_fn, params, prepared[2:6], canaries=config.canaries, seed=seed)
    records = len(dirac.data[0])
    settings = config.train.copy_and_resolve_references()
    settings.batch_size = round(config.sampling_probability * records)
    private, guarantee = training.make_private(
        settings, config.epsilon, config.delta, records, UNIT, ()
    )
    shared = {"delta": config.delta, "confidence": config.confidence}
    bounds = {}
    # The loss takes a key for dropout, of which a white box has no use.
    key = jax.random.key(seed)
    one = audit.Training(
        lambda params, *example: dirac.loss_fn(params, *example, key),
        l2_clip_norm=private.l2_clip_norm,
        noise_multiplier=private.noise_multiplier,
        sampling_probability=settings.batch_size / records,
        steps=settings.steps,
        expected_batch_size=settings.batch_size,
        microbatch_size=settings.microbatch_size,
    )
    scores = audit.one_run(one, dirac, seed=seed + 1)
    bounds["one_run"] = audit.one_run_lower_bound(
        scores, dirac.included, model=one.model, **shared
    ).epsilon
    sampling, noise = np.random.SeedSequence(seed + 2).spawn(2)
    trained = training.train(
        dirac.loss_fn,
        dirac.params,
        dirac.data,
        settings,
        keys=secrets.Keys(jax.random.key(noise.generate_state(1)[0]), sampling),
        label="audit",
        workdir=workdir,
        privacy=private,
    )
    bounds["one_run_whole_training"] = audit.one_run_lower_bound(
        np.asarray(trained["canaries"]), dirac.included, model=one.model, **shared
    ).epsilon
    return guarantee, bounds


def _ngram(config, seed: int, workdir: Path):
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
        unit=UNIT,
    )
    scores = []
    for stream, records in enumerate((np.concatenate([tokens, canary]), tokens)):
        found = jax.random.split(jax.random.fold_in(jax.random.key(seed), stream), config.runs)
        mask = np.ones(records.shape, bool)
        scores.append([release(key, records, mask).probabilities[0, 0] for key in found])
    bound = audit.curve_lower_bound(
        np.array(scores[0]),
        np.array(scores[1]),
        config.delta,
        model=audit.SampledGaussian(),
        confidence=config.confidence,
        selection_fraction=SELECTION,
    )
    guarantee = release(jax.random.key(seed), tokens, np.ones(tokens.shape, bool)).guarantee
    return guarantee, {"ngram": bound.epsilon}


_TARGETS = {"train": _train, "recommender": _recommender, "ngram": _ngram}


# ---------------------------------------------------------------------------------------------------------
# Figure


def figures(records, folder: Path) -> list[Path]:
    """Audited bound against claimed ε: no honest row above the diagonal, every planted fault above it.

    Bounds beyond six times the largest claim are drawn there.
    """
    plt = plotting.pyplot()
    figure, axis = plt.subplots(figsize=(9, 5), constrained_layout=True)
    records = sorted(records, key=lambda record: record.config["epsilon"])
    highest = 6 * max(record.config["epsilon"] for record in records)
    rows = list(dict.fromkeys(name.partition("/")[0] for r in records for name in r.metrics))
    for row in rows:
        found = [r.metrics for r in records if f"{row}/bound" in r.metrics]
        x, y = ([metrics[f"{row}/{name}"] for metrics in found] for name in ("claim", "bound"))
        planted = row.startswith("fault_")
        words = row.removeprefix("fault_").replace("_", " ") if planted else WORDS[row]
        style = (
            {"marker": "x", "linestyle": "none"} if planted else {"marker": "o", "markersize": 4}
        )
        axis.plot(
            x, np.clip(y, 1e-2, highest), label=f"planted: {words}" if planted else words, **style
        )
    claims = sorted({r.config["epsilon"] for r in records})
    ends = np.array([claims[0] / math.sqrt(2), claims[-1] * math.sqrt(2)])
    axis.plot(ends, ends, "k--", label="the claim")
    axis.set(xscale="log", yscale="log", xlabel="claimed ε", ylabel="audited lower bound on ε")
    ticks = [0.1, 0.3, 1, 2, 4, 8, 16, 32]
    axis.set_xticks(claims, [f"{claim:g}" for claim in claims])
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ylim(claims[0] / 10, highest * 1.2)
    axis.minorticks_off()
    figure.legend(fontsize=8, loc="outside right upper")
    return [plotting.save(figure, folder / "audit.png")]
