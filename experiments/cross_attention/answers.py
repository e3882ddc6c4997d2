"""Answers in words: what a public language model would say a text is, and what a released memory adds to it.

A template asks for the label of a text. The model's odds of the labels' words are compared, less their mean
over public texts, without which a small model says one word nearly always. A memory, or another release that
tells labels apart, biases the logits of those words. So texts are answered in words at no cost beyond that of
the release, however many there are.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx._validate import check_integer
from dpx.nn import lora, pretrained
from dpx.nn.pretrained import Decoder, DecoderSettings, padded
from experiments.cross_attention.labelled import Documents
from experiments.dp_transformer.documents import Bytes, check_kind
from experiments.dp_transformer.pieces import bytes_of, in_pieces, kept, once

_PIECE = 16  # texts that are read at a time
_WIDTH = 8  # of which the number of tokens of a piece is a multiple


def check(language, num_groups: int) -> None:
    """Raises ValueError, FileNotFoundError or ModuleNotFoundError for a section that cannot be used."""
    check_kind(language, "language", "none", "random")
    if language.kind == "none":
        return
    check_integer(language.length, "config.language.length")
    words = tuple(language.words)
    if len(words) != num_groups:
        raise ValueError(
            f"config.language.words={words} must be {num_groups} words, one for each label in their order"
        )
    if language.template.count("{}") != 1:
        raise ValueError(
            f"config.language.template={language.template!r} must have one {{}}, where the text goes"
        )
    _first_tokens(_opened(language)[0], words)


def model_files(language) -> list[np.ndarray]:
    """The bytes of the model's files."""
    return bytes_of(_path(language)) if language.kind == "pretrained" else []


def in_words(
    language, data: Documents, releases: Mapping[str, Callable[[np.ndarray], np.ndarray]]
) -> dict[str, np.ndarray]:
    """What is said of the documents that ask, (m, words), by row.

    Args:
      language: The section.
      data: The documents, of which only public ones and those that ask are read.
      releases: What a release gives each label, (n, words), of the keys (n, dim) of documents.
    """
    read = _reader(language)
    odds, public = read(data.texts), read(data.public_texts)
    rows = {"pretrained": odds, "public": answered(odds, public)}
    for row, scores in releases.items():
        given = scores(data.queries), scores(data.public)
        rows[f"words_{row}"] = biased(odds, public, *given)
    return rows


@kept
def _reader(language) -> Callable[[Sequence[str]], np.ndarray]:
    return once(reader(language))


def reader(language) -> Callable[..., np.ndarray]:
    """Which makes the log-probabilities (n, words) of the labels' words after texts.

    Before each text may stand an example: another text, and its word. Texts of about one length are read
    together, so what is released must not follow from private ones.
    """
    tokenizer, model = _opened(language)
    graph, state = nnx.split(model)
    words = _first_tokens(tokenizer, tuple(language.words))
    before, after = tokenizer.encode(language.template.split("{}"))
    start = [] if tokenizer.start is None else [tokenizer.start]

    def filled(texts: Sequence[str]) -> list[list[int]]:
        return [
            [*before, *text[: language.length], *after] for text in tokenizer.encode(list(texts))
        ]

    @jax.jit
    def odds(state, tokens, last):
        model = nnx.merge(graph, state)
        hidden = jnp.take_along_axis(model.trunk(tokens), last[:, None, None], axis=1)
        return jax.nn.log_softmax(model.logits(hidden)[:, 0])[:, words]

    def read(texts: Sequence[str], examples: Sequence[tuple[str, str]] = ()) -> np.ndarray:
        parts = [filled(texts)]
        if examples:
            shown, said = zip(*examples, strict=True)
            parts = [filled(shown), tokenizer.encode([f"{word}\n\n" for word in said]), *parts]
        asked = [
            np.array([*start, *itertools.chain(*prompt)], np.int32)
            for prompt in zip(*parts, strict=True)
        ]
        sizes = np.array([-(-len(text) // _WIDTH) * _WIDTH for text in asked])
        found = np.empty((len(texts), len(words)), np.float32)
        for size in np.unique(sizes):
            at = np.flatnonzero(sizes == size)
            tokens, mask = padded([asked[i] for i in at], int(size))
            last = mask.sum(1) - 1

            def some(rows, tokens=tokens, last=last):
                return odds(state, tokens[rows], last[rows])

            found[at] = in_pieces(some, len(at), _PIECE)
        return found

    return read


def answered(odds: np.ndarray, public: np.ndarray) -> np.ndarray:
    """The log-odds of each word (n, words), less their mean over public texts."""
    return odds - public.mean(0)


def biased(
    odds: np.ndarray, public: np.ndarray, scores: np.ndarray, public_scores: np.ndarray
) -> np.ndarray:
    """Log-odds of words with the log-shares of a release as a bias, (n, words).

    Args:
      odds, public: What the model says of texts, and of public ones.
      scores, public_scores: What the release gives each label of these, (n, words); its logarithms count as
        much as the model's: they are scaled to the same standard deviation over public texts.
    """

    def told(scores: np.ndarray) -> np.ndarray:
        logs = np.log(np.maximum(scores, 1e-6 * np.abs(scores).max(1, keepdims=True) + 1e-12))
        return logs - logs.mean(1, keepdims=True)

    words = odds - odds.mean(1, keepdims=True), public - public.mean(1, keepdims=True)
    labels = told(scores), told(public_scores)
    spreads = [float((x - x.mean(0)).std()) for x in (words[1], labels[1])]
    weight = spreads[0] / max(spreads[1], 1e-12)
    return answered(*words) + weight * answered(*labels)


def _opened(language) -> tuple[Any, Decoder]:
    if language.kind == "random":
        settings = DecoderSettings(Bytes.vocab_size, dim=16, num_layers=2, num_heads=2)
        tokenizer, model = Bytes(), Decoder(settings, rngs=nnx.Rngs(0))
    else:
        tokenizer, model = _loaded(str(_path(language)))
    if model.shift is None:  # with which the trunk is the whole model, and one position has logits
        lora.attach(model, target_modules=(), shift=True)
    return tokenizer, model


@functools.lru_cache(maxsize=1)
def _loaded(path: str) -> tuple[Any, Decoder]:
    found = pretrained.open_checkpoint(path)
    if not isinstance(found.settings, DecoderSettings):
        raise ValueError(
            f"config.language.path={path!r} is an encoder, which says no word: use a decoder"
        )
    model = pretrained.load(found, frozen=True, unroll=True)
    assert isinstance(model, Decoder)
    return found.tokenizer(), model


def _path(language) -> Any:
    return language.path or pretrained.default_path()


def _first_tokens(tokenizer, words: tuple[str, ...]) -> np.ndarray:
    """The first token of each word, by which they have to differ."""
    tokens = [tokenizer.encode([word])[0] for word in words]
    first = [int(ids[0]) if len(ids) else -1 for ids in tokens]
    if len(set(first)) < len(first) or -1 in first:
        raise ValueError(
            f"config.language.words={words} must begin with tokens of which no two are equal: use other words"
        )
    return np.array(first)
