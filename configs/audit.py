"""Audits: how much of a claimed ε canaries can prove, and planted faults.

    train (default)  trains a small regression with `dpx.clipped_grad`, `dpx.privatize` and
                     `dpx.poisson_batches` at the noise of `dpx.calibrate_dpsgd`: thousands of runs that are
                     seen at every step or at the end, and one run with thousands of canaries; then the same
                     with each fault of `experiments/audit/training_faults.py`, whose bound has to pass the
                     claim
    fit              audits `dpx.training.fit` as a whole, by Poisson sampling and random allocation, of
                     records and of users who have several, each in one run that holds thousands of canaries
    recommender      audits the recommender's loss, and its trainer as a whole, in one run
    ngram            audits the release of `dpx.ngram.fit` in many runs

    python -m experiments.run   --config=configs/audit.py --workdir=runs/audit
    python -m experiments.sweep --config=configs/audit.py --workdir=runs/audit_epsilon
    python -m experiments.run   --config=configs/audit.py:fit --workdir=runs/audit_fit
    python -m experiments.run   --config=configs/audit.py:recommender --workdir=runs/audit_recommender
    python -m experiments.run   --config=configs/audit.py:ngram --workdir=runs/audit_ngram

A run of `train` takes 100 s of one core, of which the faults take about half. At ε = 4 it proves 95 % of
the claim; every planted fault passes it. The tables are in SECURITY.md.
"""

from ml_collections import ConfigDict

from configs import recommender
from configs.common import begin, parse_arg

VARIANTS = ("train", "fit", "recommender", "ngram")
FAULTS = (
    "noise_half_the_variance",
    "noise_over_batch_size",
    "noise_per_microbatch",
    "noise_same_key",
    "noise_key_reused_after_3",
    "noise_missing_in_a_leaf",
    "clip_doubled",
    "batches_of_fixed_size",
    "accounted_half_the_steps",
)

MEANINGS = recommender.MEANINGS | {
    "epsilon": "the claimed ε that the audit attacks",
    "target": "what is audited; fixed by the variant",
    "confidence": "with which each lower bound holds",
    "sampling_probability": "of a record in a step",
    "steps": "steps of the audited training",
    "runs": "runs with the canary, and as many without",
    "input_runs": "runs with a canary that is an input, and with crowds of others",
    "fault_runs": "runs of each planted fault",
    "canaries": "canaries of the audit in one run",
    "records_per_user": "records that a step draws of a user at most",
    "microbatch_size": "records, or users, whose gradients are clipped at a time, to bound memory",
    "faults": "which faults are planted",
}


def get_config(arg: str = "") -> ConfigDict:
    variant, tiny = parse_arg(arg, VARIANTS)
    config = ConfigDict(begin("audit.canaries", epsilon=4.0, delta=1e-5))
    config.update({"target": variant, "confidence": 0.95})
    if variant == "train":
        size = 400 if tiny else 20_000
        config.update({"sampling_probability": 0.5, "steps": 10, "runs": size, "canaries": size})
        config.update({"input_runs": 400 if tiny else 10_000, "fault_runs": 400 if tiny else 3_000})
        config.faults = FAULTS[-1:] if tiny else FAULTS
    if variant == "fit":
        config.update({"sampling_probability": 0.25, "steps": 8, "records_per_user": 2})
        config.update({"canaries": 400 if tiny else 60_000, "microbatch_size": 250})
    if variant == "ngram":
        config.runs = 200 if tiny else 10_000
    if variant == "recommender":
        whole = recommender.get_config("synthetic,tiny")
        config.update({name: whole[name] for name in ("data", "model", "reattention", "train")})
        config.update({"data": {"train_on_validation": False}, "evaluate": {"split": "test"}})
        config.update({"canaries": 200 if tiny else 10_000, "sampling_probability": 0.5})
        size = {"steps": 4 if tiny else 10, "microbatch_size": 50 if tiny else 250}
        config.update({"train": {**size, "checkpoint_every": 1000, "log_every": 1000}})
    return config


def sweep(arg: str = "") -> dict[str, list]:
    _, tiny = parse_arg(arg, VARIANTS)
    return {"epsilon": [4.0, 8.0] if tiny else [2.0, 4.0, 8.0]}
