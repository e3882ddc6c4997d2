"""Whole trainings by `fit`, replayed on neighbours: what a record moves, and what the noise has cost."""

import numpy as np
import pytest
from training_cases import PRIVATE_FILES, USERS, X, Y, fit, loss_fn, of_users, secure

from dpx import audit
from dpx.training import AdaptiveClipNorm

KINDS = {
    "poisson": {},
    "allocation": {"sampling": "allocation"},
    "adaptive": {"l2_clip_norm": AdaptiveClipNorm(start=0.5, count_noise=2.0)},
    "secure": {"secure": True},
    "secure allocation": {"secure": True, "sampling": "allocation"},
    "secure users": {"secure": True} | of_users(2),
}


def steep(params, x, y):
    """With gradients far beyond the clipping norm."""
    return 10 * loss_fn(params, x, y)


@pytest.mark.quick_cases("allocation")
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_or_user_moves_its_own_steps_as_declared_and_stated(kind):
    """A replay reads epochs, probabilities and noise off the run, and tells their price."""
    about, users = KINDS[kind], "users" in kind

    def program(rows, workdir):
        x, y, whose = rows
        given = (
            about | (secure() if "secure" in about else {}) | ({"users": whose} if users else {})
        )
        trained = fit((x, y), steep, workdir=workdir, log_every=6, **given)
        return {"params": trained.params, "epsilon": trained.guarantee.epsilon}

    gone = 14 if "secure" in about else 18  # whom the samples of this key have
    kept = USERS != 5 if users else np.arange(100) != gone
    ids = np.delete(np.arange(13), 5) if users else np.flatnonzero(kept)
    whole, rest = (X, Y, USERS), (X[kept], Y[kept], USERS[kept])
    with audit.recording():
        first = audit.record(program, whole, ignore=PRIVATE_FILES)
        found = audit.replay(
            program, whole, rest, ids=ids, first=first, ignore=PRIVATE_FILES
        ).check()
    assert 0.99 < found.largest_ratio <= 1 + 1e-6
    if kind == "allocation":
        assert sum(each.ratio > 0 for each in found.compared) in (1, 2)
    cost = first.epsilon(1e-3)
    assert first.left["result/epsilon"] == pytest.approx(cost, rel=2e-3)
    assert cost <= 2.0
    noise = {seen.key for seen in first.releases}
    assert len(first.releases) == len(noise) == 6
    assert not noise & {words for purpose, words in first.keys if purpose != "noise"}
