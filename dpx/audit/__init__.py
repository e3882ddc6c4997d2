"""Audits of privacy claims: replays of whole runs on neighbouring data, and statistical lower bounds on ε."""

from dpx.audit.canaries import Runs, Training, many_runs
from dpx.audit.comparison import Replay
from dpx.audit.curves import SampledGaussian
from dpx.audit.dirac import Dirac, dirac, one_run
from dpx.audit.guessing import OneRunAudit, one_run_lower_bound
from dpx.audit.lower_bounds import Audit, CurveAudit, curve_lower_bound, epsilon_lower_bound
from dpx.audit.recordings import Recording
from dpx.audit.replay import record, recording, replay
from dpx.audit.steps import StepAudit, step_lower_bound

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
