"""A model of the next item: what it computes, and what of it is saved and loaded."""

import functools
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx import _storage as storage
from dpx import _validate
from dpx.data import Histories, left_pad
from dpx.data.cells import identifier
from dpx.reattention import ParameterNoise
from experiments.dp_transformer import models
from experiments.dp_transformer.warm_start import Start, template

CATALOGUE = "catalogue.json"  # beside the model: what the data call the items


def build(config, num_tokens: int, seed: int, bias: np.ndarray | None, start: Start | None):
    """A new model's graph and parameters, with an output bias (num_tokens,) or a start where there is one."""
    model = models.build(config, num_tokens, config.data.max_length, seed)
    if start is not None:
        model.embed.embedding[...] = config.model.embed_std * jnp.asarray(start.embeddings)
        # The logits begin as the start's, whatever the embeddings are.
        model.norm.scale = nnx.Param(jnp.zeros(config.model.dim))
    if bias is not None:
        model.output_bias[...] = jnp.asarray(bias - np.max(bias), jnp.float32)
    return nnx.split(model)


def logits(graph, noise_std, start, params, tokens, mask, last_only, dropout_key=None) -> jax.Array:
    """(L, T), or (1, T) with `last_only`, of the T tokens; leading axes are kept."""
    correction = {} if noise_std is None else {"noise_std": noise_std}
    found = nnx.merge(graph, params)(
        tokens, mask=mask, last_only=last_only, dropout_key=dropout_key, **correction
    )
    return found if start is None else found + start.logits(tokens, mask, last_only)


def loss(graph, noise_std, start, last_only, params, inputs, targets, input_mask, target_mask, key):
    """Mean cross-entropy over one user's targets; zero for a user without any."""
    found = logits(graph, noise_std, start, params, inputs, input_mask, last_only, key)
    if last_only:
        targets, target_mask = targets[-1:], target_mask[-1:]
    log_probs = jax.nn.log_softmax(found.astype(jnp.float32))
    picked = jnp.take_along_axis(log_probs, targets[:, None], axis=1)[:, 0]
    return -jnp.where(target_mask, picked, 0).sum() / jnp.maximum(target_mask.sum(), 1)


def scorer(graph, noise_std, start):
    """A function of parameters, tokens (B, L) and mask to the scores (B, M) of all items."""

    @jax.jit
    def score(params, tokens, mask):
        last = logits(graph, noise_std, start, params, tokens, mask, True)[:, 0]
        return last if start is None else start.widen(last)

    return score


def start_scorer(start: Start):
    """A function of tokens (B, L) and mask to what the start alone scores all items, (B, M)."""
    return jax.jit(lambda tokens, mask: start.widen(start.logits(tokens, mask, True)[:, 0]))


def save(workdir: Path, params, noise_std, start: Start | None, known: Histories, num_tokens: int):
    """Saves all that recommending needs: nobody who has the folder needs the users' histories.

    Args:
      workdir: The run's folder.
      params, noise_std: Of the private model.
      start: What it starts from, if anything.
      known: Histories over the catalogue, whose ids are saved.
      num_tokens: How many items the model knows.
    """
    ids = np.arange(known.num_items) if known.item_ids is None else known.item_ids
    storage.write_json(workdir / CATALOGUE, {"item_ids": ids.tolist(), "num_tokens": num_tokens})
    models.save(workdir, params, noise_std, **_saved(start))


def load(config, workdir: Path) -> "PrivateRecommender":
    """The private model that a run left (of its first seed); reads the run's folder alone."""
    known, start = storage.read_json(workdir / CATALOGUE), None
    item_ids, num_tokens = known["item_ids"], known["num_tokens"]
    if config.start.budget_fraction:
        start = template(num_tokens, len(item_ids), config.model.dim)
    model = models.build(config, num_tokens, config.data.max_length, config.seed)
    graph, params = nnx.split(model)
    params, noise_std, *saved = models.load(config, workdir, params, num_tokens, **_saved(start))
    if start is not None:
        start = Start(**saved[0])
    return PrivateRecommender(graph, params, noise_std, start, item_ids, config.data.max_length)


class PrivateRecommender:
    """The private model: recommends items to follow a history.

    Attributes:
      item_ids: What the data call the items that can be recommended: `dpx.data.cells.identifier`s.
    """

    def __init__(
        self,
        graph,
        params,
        noise_std: ParameterNoise | None,
        start: Start | None,
        item_ids: list,
        max_length: int,
    ):
        self.item_ids = item_ids
        self._numbers = {item: number for number, item in enumerate(item_ids)}
        self._score = functools.partial(scorer(graph, noise_std, start), params)
        self._start, self._max_length = start, max_length

    def recommend(self, history: Iterable, k: int = 10, *, exclude_seen: bool) -> list:
        """The items that score highest after a history, the best first.

        Args:
          history: The ids of a user's items in time order, as the data write them; may be empty.
          k: How many to recommend; fewer come back where the catalogue has no more.
          exclude_seen: Whether to leave out the items of the history.

        Returns:
          Ids of items.

        Raises:
          ValueError: for an id that the catalogue does not have.
        """
        _validate.check_integer(k, "k")
        seen = [self._number(item) for item in history]
        known = Histories((np.array(seen, np.int32),), len(self.item_ids))
        if self._start is not None:
            known = self._start.restrict(known)
        tokens, mask = left_pad(known.items, self._max_length)
        order = np.argsort(-np.asarray(self._score(tokens, mask)[0]), kind="stable")
        if exclude_seen:
            order = order[~np.isin(order, seen)]
        return [self.item_ids[number] for number in order[:k]]

    def _number(self, item) -> int:
        try:
            return self._numbers[identifier(item)]
        except (ValueError, KeyError):
            raise ValueError(
                f"history holds {item!r}, which the catalogue does not have: leave it out, or write it as in "
                f"item_ids, such as {self.item_ids[0]!r}"
            ) from None


def _saved(start: Start | None) -> dict:
    """What is saved beside the parameters."""
    return {} if start is None else {"start": start._asdict()}
