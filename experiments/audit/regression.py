"""A small regression that is trained thousands of times, honestly and with each planted fault."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import dpx
from dpx import audit, privacy
from dpx.privacy import PrivacyGuarantee
from dpx.training import Keys
from experiments.audit.training_faults import FAULTS

UNIT = "record"
OTHERS, FEATURES = 4, 16  # records beside the canary, and numbers in each
SELECTION = 0.1  # of the runs, on which tests are chosen


class Problem(NamedTuple):
    """A regression, whose records are (x, y) with x (FEATURES,)."""

    params: dict
    data: tuple
    canary: tuple


def seed(keys: Keys, name: str) -> int:
    """The seed of the audit with this name."""
    return int(keys.seed(name).generate_state(1)[0])


def audited(config, keys: Keys) -> tuple[PrivacyGuarantee, dict[str, float]]:
    """The guarantee that is claimed, and a bound on ε for each adversary and each planted fault."""
    seed_of = functools.partial(seed, keys)
    noise = multiplier(config, config.steps)
    bounds = {}
    many, problem = _gradient_canary(config, noise)
    runs = audit.many_runs(many, *problem, runs=config.runs, seed=seed_of("white box"))
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

    runs = audit.many_runs(
        many, *_crowd(problem), runs=config.input_runs, seed=seed_of("white box, crowd")
    )
    bounds["white_box_crowd"] = curve(*runs.statistics(many)).epsilon
    plain, problem = _input_canary(config, noise)
    runs = audit.many_runs(plain, *problem, runs=config.input_runs, seed=seed_of("input canary"))
    bounds["input_canary"] = curve(*runs.statistics(plain)).epsilon
    bounds["input_canary_final"] = curve(runs.final_inside, runs.final_outside).epsilon

    start = regression()
    dirac = audit.dirac(
        squared_error,
        start.params,
        start.data,
        canaries=config.canaries,
        seed=seed_of("canaries of one run"),
    )
    one = _training(
        config, noise, dirac.loss_fn, dirac.included.sum() + OTHERS, microbatch_size=250
    )
    scored = audit.one_run(one, dirac, seed=seed_of("one run")), dirac.included, config.delta
    for row, model in (("one_run", one.model), ("one_run_any_mechanism", None)):
        bounds[row] = audit.one_run_lower_bound(
            *scored, model=model, confidence=config.confidence
        ).epsilon
    for name in config.faults:
        bounds[f"fault_{name}"] = fault_bound(name, config, seed_of(f"fault {name}"))
    return guarantee(config), bounds


def guarantee(config) -> PrivacyGuarantee:
    """Of one training."""
    return privacy.dpsgd_guarantee(
        multiplier(config, config.steps),
        config.delta,
        sampling_probability=config.sampling_probability,
        steps=config.steps,
        unit=UNIT,
    )


def fault_bound(name: str, config, seed: int) -> float:
    """The larger of the white-box bounds on ε of a training with a fault, each for half the risk."""
    claimed, problem = _gradient_canary(config, multiplier(config, config.steps))
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


def multiplier(config, steps: int) -> float:
    """The noise multiplier of that many steps at the budget of the config."""
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


def squared_error(params, x, y):
    return 0.5 * (x @ params["weights"] + params["bias"] - y) ** 2


def regression() -> Problem:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(OTHERS + 1, FEATURES)).astype(np.float32)
    y = rng.normal(size=OTHERS + 1).astype(np.float32)
    params = {"weights": jnp.zeros(FEATURES), "bias": jnp.zeros(())}
    # A large target: its gradient is clipped at every step.
    return Problem(params, (x[1:], y[1:]), (x[0], np.float32(100.0)))


def _input_canary(config, noise) -> tuple[audit.Training, Problem]:
    return _training(config, noise, squared_error, OTHERS), regression()


def _gradient_canary(config, noise) -> tuple[audit.Training, Problem]:
    params, data, canary = regression()
    dirac = audit.dirac(squared_error, params, data, canaries=1, seed=0)
    problem = Problem(dirac.params, (np.zeros(OTHERS, np.int32), *data), (np.int32(1), *canary))
    return _training(config, noise, dirac.loss_fn, OTHERS), problem


def _crowd(problem: Problem) -> Problem:
    """All other records are canaries too, against this one."""
    return problem._replace(data=(np.full(OTHERS, -1, np.int32), *problem.data[1:]))
