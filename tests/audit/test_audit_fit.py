"""Canaries in whole trainings by `dpx.training.fit`: below the claim, and above it with a fault."""

import dataclasses

import numpy as np
import pytest

from configs.audit import get_config
from dpx.training import keys as secrets
from dpx.training import loop, sampling
from experiments.audit import whole


def config(canaries):
    found = get_config("fit")
    found.canaries = canaries
    return found


def keys():
    return secrets.from_seed(1 << 40)


@pytest.mark.slow
@pytest.mark.parametrize("row", whole.ROWS)
def test_an_honest_training_is_not_accused(row):
    found = whole.bound(config(20_000), keys(), row)
    assert 0.7 * 4.0 < found < 4.0


@pytest.mark.slow
@pytest.mark.parametrize("row", ["fit_allocation", "fit_users", "fit_secure"])
def test_too_little_noise_is_found(row, monkeypatch):
    real = loop._mean

    def half(privacy, *rest):
        return real(
            dataclasses.replace(privacy, noise_multiplier=privacy.noise_multiplier / 2**0.5), *rest
        )

    monkeypatch.setattr(loop, "_mean", half)
    assert whole.bound(config(4000), keys(), row) > 4.0


@pytest.mark.slow
@pytest.mark.parametrize("row", ["fit_allocation", "fit_users_allocation"])
def test_a_record_or_user_in_two_batches_of_an_epoch_is_found(row, monkeypatch):
    real = sampling._allocated

    def twice(root, *rest):
        others = real(np.random.SeedSequence(9), *rest)
        for (one, kept), (other, also) in zip(real(root, *rest), others, strict=True):
            chosen = np.union1d(one[kept], other[also]).astype(np.int32)
            yield chosen, np.ones(len(chosen), bool)

    monkeypatch.setattr(sampling, "_allocated", twice)
    assert whole.bound(config(4000), keys(), row) > 4.0


@pytest.mark.slow
def test_sums_along_a_canary_are_its_norm_where_it_is_sampled():
    """Whatever records of a user are drawn, it is one clipping norm, in one step of each epoch."""
    claim, inside, outside = whole.run(config(4000), keys(), "fit_users_allocation")
    both = claim.noise_multiplier
    assert outside.std() == pytest.approx(both, rel=0.02)
    assert inside.mean() == pytest.approx(0.25, abs=5 * both / inside.size**0.5)
    each = inside.reshape(len(inside), 2, 4).sum(axis=2)
    assert each.std() == pytest.approx(2 * both, rel=0.05)  # of the noise alone, as all have one
