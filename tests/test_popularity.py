import jax
import numpy as np
import pytest

from dpx import popularity
from dpx.data import Histories

HISTORIES = Histories(tuple(np.array(h, int) for h in ([0, 0, 1], [2], [0, 3, 1, 2], [])), 5)


def noiseless(histories, l2_clip=1.0):
    return popularity.fit(
        jax.random.key(0), histories, epsilon=1e8, delta=1e-5, l2_clip=l2_clip
    ).counts


def test_counts_users_not_events():
    assert popularity.count(HISTORIES).tolist() == [2, 2, 2, 1, 0]
    np.testing.assert_allclose(noiseless(HISTORIES, 10.0), [2, 2, 2, 1, 0], atol=1e-2)


def test_one_user_moves_the_histogram_by_at_most_the_clip():
    base = noiseless(HISTORIES)
    for extra in ([4], [0, 1, 2, 3, 4], [0] * 50, [3, 4]):
        more = Histories((*HISTORIES.items, np.array(extra)), 5)
        assert np.linalg.norm(noiseless(more) - base) == pytest.approx(1.0, abs=1e-3)


def test_noise_and_probabilities():
    many = Histories(HISTORIES.items, 20_000)
    fitted = popularity.fit(jax.random.key(1), many, epsilon=1.0, delta=1e-5)
    assert np.std(fitted.counts) == pytest.approx(fitted.noise_std, rel=0.03)
    assert fitted.guarantee.event.noise_multiplier == fitted.noise_std
    log_probabilities = fitted.log_probabilities()
    assert np.exp(log_probabilities).sum() == pytest.approx(1)
    assert np.argmax(log_probabilities) == np.argmax(fitted.counts)
    with pytest.raises(ValueError, match="l2_clip"):
        popularity.fit(jax.random.key(1), many, epsilon=1.0, delta=1e-5, l2_clip=0)
