import jax.numpy as jnp
import numpy as np
import pytest

from dpx.recommend import metrics


def slow_rank(scores, target, exclude=()):
    others = [s for i, s in enumerate(scores) if i != target and i not in exclude]
    better = sum(s > scores[target] for s in others)
    return 1 + better + sum(s == scores[target] for s in others) / 2


def test_ranks_against_a_loop():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 6, (40, 12)).astype(np.float32)
    target = rng.integers(0, 12, 40)
    exclude = rng.random((40, 12)) < 0.3
    plain = metrics.target_ranks(jnp.asarray(scores), jnp.asarray(target))
    excluded = metrics.target_ranks(
        jnp.asarray(scores), jnp.asarray(target), exclude=jnp.asarray(exclude)
    )
    for row in range(40):
        assert plain[row] == slow_rank(scores[row], target[row])
        assert excluded[row] == slow_rank(
            scores[row], target[row], set(np.flatnonzero(exclude[row]))
        )


def test_hit_rate_and_ndcg():
    ranks = jnp.array([1.0, 2.0, 10.0, 11.0])
    assert metrics.hit_rate(ranks, 10) == pytest.approx(0.75)
    expected = (1 + 1 / np.log2(3) + 1 / np.log2(11)) / 4
    assert metrics.ndcg(ranks, 10) == pytest.approx(expected)
