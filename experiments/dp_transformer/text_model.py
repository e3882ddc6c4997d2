"""A character model whose logits start from an n-gram model: its loss, and what a run leaves of it."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx import _watch
from dpx.nn.transformer import generate
from dpx.reattention import ParameterNoise
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import models, record_probability
from experiments.dp_transformer.corpus import Public
from experiments.dp_transformer.pieces import in_pieces, inputs

_RECORDS_AT_ONCE = 500


def build(config, public: Public):
    """The graph and the initial parameters of the model that a config describes."""
    return nnx.split(models.build(config, public.vocab_size, public.length, config.seed))


def load(config, workdir: Path) -> "PrivateText":
    """The private model that a run left: with Re-Attention, if the config has it. Reads no private data."""
    corpus = corpora.public(config)
    graph, params = build(config, corpus)
    more = {}
    if config.prior.budget_fraction:
        shape = (corpus.vocab_size ** (config.prior.order - 1), corpus.vocab_size)
        more = {"prior": np.zeros(shape, np.float32)}
    params, noise_std, *saved = models.load(config, workdir, params, corpus.vocab_size, **more)
    table = np.asarray(saved[0]) if saved else None
    return PrivateText(corpus, graph, table, noise_std, params)


class PrivateText:
    """A trained character model: samples records and scores them."""

    def __init__(self, public: Public, graph, table, noise_std: ParameterNoise | None, params):
        self._public, self.params = public, params
        self._logits = jax.jit(
            lambda tokens: _logits(public, graph, table, noise_std, params, tokens, None)
        )

    def sample(self, key: jax.Array, count: int) -> list[str]:
        """`count` records drawn from the model."""
        public = self._public
        drawn = generate(self._logits, key, count, public.length, start=public.start)
        return public.decode(np.asarray(drawn))

    def log_prob(self, texts: list[str]) -> np.ndarray:
        """(n,) log-probability of each text, with its end where records end, in nats.

        Raises:
          ValueError: for a text that is too long, a window that is not as long as those the model was
            trained on, or a character outside a strict alphabet.
        """
        return self._log_probs(self._public.encode(texts))

    def nats(self, records) -> float:
        """Nats per character, ends of names included."""
        return _nats(self._log_probs(records), records)

    def evaluate(self, records) -> tuple[float, float]:
        """`nats` of held-out records, and how probable one of them is (`record_probability`)."""
        found = self._log_probs(records, record_probability.ASSUMPTION)
        score = record_probability.score(found, records.mask.sum(axis=1), records.users)
        return _nats(found, records), score

    def _log_probs(self, records, assumption: str | None = None) -> np.ndarray:
        """(n,) log-probability of each record, of whose number a guarantee may assume that it is public."""
        count, size = len(records), _RECORDS_AT_ONCE
        if records.users is None:  # how many records users have is not public
            size = min(size, _watch.public(count, assumption))

        def log_probs(rows: np.ndarray) -> jax.Array:
            tokens = records.tokens[rows]
            logits = self._logits(jnp.asarray(inputs(self._public, tokens)))
            picked = _picked_log_probs(logits, tokens)
            return jnp.where(records.mask[rows], picked, 0).sum(axis=1)

        return in_pieces(log_probs, count, size).astype(np.float64)


def _nats(log_probs: np.ndarray, records) -> float:
    return -math.fsum(log_probs.tolist()) / int(records.mask.sum())


def _picked_log_probs(logits, targets):
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def _logits(public: Public, graph, table, noise_std, params, inputs, key):
    """The model's logits, added to the prior's log-probabilities where there is a prior."""
    correction = {} if noise_std is None else {"noise_std": noise_std}
    logits = nnx.merge(graph, params)(inputs, dropout_key=key, **correction)
    if table is None:
        return logits
    vocab_size = public.vocab_size
    context = jnp.zeros_like(inputs)
    length, reach = inputs.shape[-1], round(np.log(len(table)) / np.log(vocab_size))
    for back in reversed(range(reach)):
        before = [(0, 0)] * (inputs.ndim - 1) + [(back, 0)]
        shifted = jnp.pad(inputs, before, constant_values=public.start)[..., :length]
        context = context * vocab_size + shifted
    return logits + jnp.asarray(table)[context]


def loss(public: Public, graph, table, noise_std, params, inputs, targets, mask, key):
    """Nats of one record over the width, not its length, so that a character counts the same in all.

    The loss that is reported is that of `weight`: nats per character, as in the tables.
    """
    logits = _logits(public, graph, table, noise_std, params, inputs, key)
    return -jnp.where(mask, _picked_log_probs(logits, targets), 0).sum() / len(targets)
