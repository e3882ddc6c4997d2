"""How recommenders are measured: every item is ranked for each user whose next item is held out."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dpx import _watch
from dpx._validate import check_decay
from dpx.recommend import metrics
from dpx.runs.experiment import Measure
from experiments import checks
from experiments.dp_transformer.pieces import in_pieces
from experiments.repeated import measure

ASSUMPTION = "the number of users whose item is held out is public"
_USERS_AT_ONCE = 512


def check(config) -> None:
    """Raises ValueError for a section `evaluate`, or a number of seeds, that cannot be used."""
    checks.choice(config, "evaluate.split", ("test", "validation"))
    checks.integers(config, "num_seeds", "evaluate.k")
    check_decay(config.popularity_age_decay, "config.popularity_age_decay")


def evaluate(
    config,
    seen: Sequence[np.ndarray],
    next_items: np.ndarray,
    score: Callable[[np.ndarray], jax.Array],
    assumption: str | None = ASSUMPTION,
) -> dict[str, float]:
    """NDCG@k and HIT@k over all evaluated users: means of `by_user`, which has the arguments."""
    return means(by_user(config, seen, next_items, score, assumption), assumption)


def means(
    values: Mapping[str, np.ndarray], assumption: str | None = ASSUMPTION
) -> dict[str, float]:
    """The mean over users of each metric: of exact sums, so that `sensitivities` holds."""
    return {
        name: math.fsum(own.tolist()) / _watch.public(len(own), assumption)
        for name, own in values.items()
    }


def by_user(
    config,
    seen: Sequence[np.ndarray],
    next_items: np.ndarray,
    score: Callable[[np.ndarray], jax.Array],
    assumption: str | None = ASSUMPTION,
) -> dict[str, np.ndarray]:
    """NDCG@k and HIT@k of each evaluated user, (U,).

    A value lies in [0, 1] and depends on that user and the scores alone.

    Args:
      config: With the section `evaluate`.
      seen: The items of each of U users.
      next_items: (U,) the item that came next.
      score: Of users by number, (B,), their (B, M); or (1, M) where the scores are the same for all.
      assumption: What a guarantee says of U, None where none rests on it.
    """
    k, count = config.evaluate.k, len(next_items)

    def ranks(rows: np.ndarray) -> jax.Array:
        scores, exclude = jnp.asarray(score(rows)), None
        if config.evaluate.exclude_seen:
            exclude = np.zeros((len(rows), scores.shape[-1]), bool)
            for place, row in enumerate(rows.tolist()):
                exclude[place, seen[row]] = True
        return _ranks(scores, jnp.asarray(next_items[rows]), exclude)

    size = min(_USERS_AT_ONCE, _watch.public(count, assumption))
    own = jnp.asarray(in_pieces(ranks, count, size))[:, None]
    kinds = {"ndcg": metrics.ndcg, "hit": metrics.hit_rate}
    return {
        f"{name}@{k}": np.asarray(jax.vmap(metric, (0, None))(own, k), np.float64)
        for name, metric in kinds.items()
    }


def sensitivities(config, num_users: int) -> dict[str, float]:
    """How far one user moves the metrics of `evaluate`, for scores that do not change.

    The mean of U values in [0, 1] is the sum over users, of sensitivity 1, divided by U, which is public.
    Beyond that is what 32 bits round a value to.

    Args:
      config: With the section `evaluate`.
      num_users: U.
    """
    most = (1 + 2**-20) / _watch.public(num_users, ASSUMPTION)
    return {f"{name}@{config.evaluate.k}": most for name in ("ndcg", "hit")}


def measures(results: Iterable[tuple[str, dict[str, float]]]) -> list[Measure]:
    """The mean and the standard error over repetitions of each row, in order of first appearance.

    Args:
      results: The name of a row with its metrics, once for each repetition.
    """
    values: dict[tuple[str, str], list[float]] = {}
    for row, found in results:
        for metric, value in found.items():
            values.setdefault((row, metric), []).append(value)
    return [measure(*name, repeated) for name, repeated in values.items()]


def words(config) -> str:
    """How the items were ranked, for the notes under a table."""
    seen = "left out of" if config.evaluate.exclude_seen else "part of"
    return (
        f"All items are ranked; those that a user has seen are {seen} the ranking. Evaluated on the "
        f"{config.evaluate.split} item."
    )


@jax.jit
def _ranks(scores, target, exclude):
    wide = jnp.broadcast_to(scores, (target.shape[0], scores.shape[-1]))
    return metrics.target_ranks(wide, target, exclude=exclude)
