"""Audits of a privacy claim: whole runs replayed on neighbouring data, and statistical lower bounds on ε."""

from dpx.audit.bounds import (
    Audit,
    CurveAudit,
    StepAudit,
    curve_lower_bound,
    epsilon_lower_bound,
    step_lower_bound,
)
from dpx.audit.canaries import Dirac, Runs, Training, dirac, many_runs, one_run
from dpx.audit.curves import SampledGaussian
from dpx.audit.guessing import OneRunAudit, one_run_lower_bound
from dpx.audit.replay import Recording, Replay, record, recording, replay

__all__ = [
    "Audit",
    "CurveAudit",
    "Dirac",
    "OneRunAudit",
    "Recording",
    "Replay",
    "Runs",
    "SampledGaussian",
    "StepAudit",
    "Training",
    "curve_lower_bound",
    "dirac",
    "epsilon_lower_bound",
    "many_runs",
    "one_run",
    "one_run_lower_bound",
    "record",
    "recording",
    "replay",
    "step_lower_bound",
]
