"""A classifier of texts on a model: how a config builds it, its loss, and what a run leaves of it."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from dpx.data.minilm import minilm_folder
from dpx.nn import pretrained
from dpx.nn.pretrained import Decoder, Encoder, EncoderSettings
from dpx.training import checkpoints
from experiments import checks
from experiments.dp_transformer.documents import Bytes, check_kind
from experiments.dp_transformer.pieces import bytes_of, in_pieces, kept, once
from experiments.dp_transformer.tuned_text import attach

MODES = ("probe", "lora", "full")
_PIECE = 64  # texts that are read at a time
_WIDTH = 16  # texts are filled up to a multiple of so many tokens


class Classifier(NamedTuple):
    """An encoder or a decoder in parts, and its tokenizer.

    Attributes:
      graph, frozen: The model's structure, and what tuning leaves as it is.
      trained: A head, and what tuning changes of the model.
      length: How many tokens of a text are read.
      labels: Their names.
      mode: One of `MODES`.
      layers: How many layers are read, the last ones.
      start: The layer at which adapters or the layers that are read begin: the states before it never change.
      center: What is subtracted from the features, (d,).
    """

    graph: Any
    trained: dict[str, Any]
    frozen: Any
    tokenizer: Any
    length: int
    labels: tuple[str, ...]
    mode: str
    layers: int
    start: int
    center: np.ndarray

    def features(self, tuned: Any, frozen: Any, text: jax.Array, mask: jax.Array) -> jax.Array:
        """(..., d): the hidden states of each text, by tokens or `trunk`, of all layers that are read.

        Of an encoder it is their mean over the tokens, of a decoder that of the last token, which alone has
        seen the whole text. Those of layers stand side by side, each scaled to entries of mean square one, as
        are the features after `center` is subtracted. Of the last layer alone, and without a center, those of
        a sentence encoder such as MiniLM have the direction of its embedding. Devlin et al.
        (arXiv 1810.04805, section 5.3) read four layers.
        """
        model = nnx.merge(self.graph, tuned, frozen)
        start = self.start if text.ndim > mask.ndim else 0
        states = model.states(text, mask, last=self.layers, start=start)
        if isinstance(model, Decoder):
            mask = mask & (mask.cumsum(-1) == mask.sum(-1, keepdims=True))
        hidden = [jnp.where(mask[..., None], x.astype(jnp.float32), 0) for x in states]
        return self.centered(jnp.concatenate([scaled(x.sum(-2)) for x in hidden], axis=-1))

    def centered(self, features: Any) -> jax.Array:
        """(..., d): features from which nothing is subtracted yet, with `center` subtracted."""
        return scaled(features - self.center)

    def logits(self, trained: dict[str, Any], frozen: Any, *text: jax.Array) -> jax.Array:
        """(..., labels) of texts: tokens or `trunk` and mask, or the features of a frozen encoder."""
        x = text[0] if self.mode == "probe" else self.features(trained["encoder"], frozen, *text)
        return x @ trained["weights"] + trained["bias"]


def scaled(x: jax.Array) -> jax.Array:
    """(..., d) with entries of mean square one."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).mean(-1, keepdims=True), 1e-12))


def check(config) -> None:
    """Raises ValueError for sections `model` and `tune` that cannot be used."""
    check_kind(config.model, "model", "scratch")
    checks.integers(config, "model.read_layers")
    checks.integers(config, "model.kept_layers", least=0)
    checks.choice(config, "model.dtype", ("float32", "bfloat16"))
    checks.choice(config, "tune.mode", MODES)
    if config.model.kind == "scratch" and config.tune.mode != "full":
        raise ValueError(
            f"config.tune.mode={config.tune.mode!r} must be 'full' for an encoder from scratch"
        )


def build(config) -> Classifier:
    """The classifier that a config describes.

    Raises:
      ValueError, FileNotFoundError: for a file that cannot be used, or adapters that the model cannot have.
      ModuleNotFoundError: where a package that the file needs, or the default model, is not installed.
    """
    mode, length = config.tune.mode, config.data.length
    tokenizer, model = _opened(config, frozen=mode != "full")
    if length > (model.settings.context_length or length):
        raise ValueError(
            f"config.data.length={length} must be at most {model.settings.context_length}, the most tokens "
            "that the model was made for"
        )
    count = model.settings.num_layers
    layers = min(config.model.read_layers, count)
    start = config.get("start", 0)
    if mode == "lora":
        attach(model, config.tune)
        start = min(model.first_adapted, count - layers + 1)
    trained: Any = {"probe": nnx.Nothing(), "lora": nnx.LoRAParam, "full": nnx.Param}[mode]
    graph, tuned, frozen = nnx.split(model, trained, ...)
    labels, dim = tuple(config.data.labels), layers * model.settings.dim
    head = {"weights": jnp.zeros((dim, len(labels))), "bias": jnp.zeros(len(labels))}
    own = head if mode == "probe" else head | {"encoder": tuned}
    center = np.zeros(dim, np.float32)
    return Classifier(graph, own, frozen, tokenizer, length, labels, mode, layers, start, center)


def loss(model: Classifier, trained: dict[str, Any], fixed: Any, *example: jax.Array) -> jax.Array:
    """The cross-entropy of one text: its arrays, its label, and a key that nothing needs.

    `fixed` are `frozen` and `center`, since an array that a loss closes over may look like examples.
    """
    (frozen, center), (*text, label, _) = fixed, example
    logits = model._replace(center=center).logits(trained, frozen, *text)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def _opened(config, *, frozen: bool) -> tuple[Any, Encoder | Decoder]:
    """A tokenizer and a model."""
    options = {"dtype": config.model.dtype, "frozen": frozen, "unroll": config.model.unroll}
    if config.model.kind == "scratch":
        shape = {name: config.model[name] for name in ("dim", "num_layers", "num_heads")}
        settings = EncoderSettings(Bytes.vocab_size, context_length=config.data.length, **shape)
        return _Bytes(), Encoder(settings, **options, rngs=nnx.Rngs(config.seed))
    found = pretrained.open_checkpoint(_path(config))
    if getattr(found.settings, "labels", 0):
        raise ValueError(
            f"config.model.path={str(found.path)!r} must be a model without a head of its own: use one "
            "such as MiniLM, BERT or SmolLM2"
        )
    return found.tokenizer(), _shortened(
        pretrained.load(found, **options), config.model.kept_layers
    )


def _shortened(model: Any, count: int) -> Encoder | Decoder:
    """The model of the first `count` layers; with 0 all of an encoder, and two thirds of a decoder.

    The last layers of a decoder turn what they know of a text into the next token.
    """
    have = model.settings.num_layers
    count = count or (have if isinstance(model, Encoder) else -(-2 * have // 3))
    if count > have:
        raise ValueError(
            f"config.model.kept_layers={count} must be at most {have}: the model has no more"
        )
    windows = getattr(model.settings, "windows", None)
    changes = {} if windows is None else {"windows": windows[:count]}
    model.settings = dataclasses.replace(model.settings, num_layers=count, **changes)
    for name, value in model.layers.items():
        model.layers[name] = nnx.Param(value[...][:count])
    return model


class _Bytes(Bytes):
    """Bytes of UTF-8, of which so many as fit are read; a text without any is one token."""

    def encode(self, texts: list[str], length: int | None = None) -> list[np.ndarray]:
        return [np.concatenate([[self.start], ids])[:length] for ids in super().encode(texts)]


def _path(config) -> Path:
    return Path(config.model.path or minilm_folder())


def model_files(config) -> list[np.ndarray]:
    """The bytes of the files that the encoder is read from."""
    return [] if config.model.kind == "scratch" else bytes_of(_path(config))


def frozen_features(model: Classifier, text: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(n, d) features of texts, by their tokens or their `trunk`, by the model before it is tuned."""
    tuned = model.trained.get("encoder", nnx.State({}))
    read = jax.jit(lambda frozen, *text: model.features(tuned, frozen, *text))
    found = np.empty((len(text), len(model.center)), np.float32)
    for rows, width in _widths(mask):
        found[rows] = _of_pieces(read, model, text[rows, :width], mask[rows, :width])
    return found


def trunk(model: Classifier, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(n, L, d): what enters layer `start` of the model, which no tuning changes, of each text."""
    tuned = model.trained.get("encoder", nnx.State({}))

    def states(frozen: Any, *text: jax.Array) -> jax.Array:
        return nnx.merge(model.graph, tuned, frozen).trunk(*text, stop=model.start)

    read = jax.jit(states)
    one = jax.eval_shape(states, model.frozen, tokens[0], mask[0])
    found = np.zeros((len(tokens), *one.shape), one.dtype)
    for rows, width in _widths(mask):
        found[rows, :width] = _of_pieces(read, model, tokens[rows, :width], mask[rows, :width])
    return found


def _widths(mask: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """The rows of texts that are filled up to the same width, and this width.

    It follows from a text's own length alone, since it changes how the text is rounded.
    """
    widths = -(-np.maximum(mask.sum(axis=1), 1) // _WIDTH) * _WIDTH
    for width in np.unique(widths):
        yield np.flatnonzero(widths == width), int(width)


def _of_pieces(read: Callable, model: Classifier, *text: np.ndarray) -> np.ndarray:
    return in_pieces(
        lambda rows: read(model.frozen, *(x[rows] for x in text)), len(text[0]), _PIECE
    )


def untuned(config, start: int = 0) -> ConfigDict:
    """The config of a classifier with the encoder of a config, of which nothing is trained.

    `start` is the layer whose input is kept of each text; 0 keeps none.
    """
    is_new = config.model.kind == "scratch"
    return ConfigDict(
        {
            "seed": config.seed if is_new else 0,  # on which only an encoder from scratch depends
            "data": {"length": config.data.length, "labels": tuple(config.data.labels)},
            "model": config.model,
            "tune": {"mode": "full" if is_new else "probe"},
            "start": start,
        }
    )


kept_build = kept(build)


@kept
def features_of(about: ConfigDict) -> Callable[[Sequence[str]], np.ndarray]:
    """Features (n, d) of texts by the encoder of an `untuned` config; each text is read once."""
    model = kept_build(about)

    def read(texts: list[str]) -> np.ndarray:
        tokens, mask = _tokens(model, texts)
        return frozen_features(model, trunk_of(about)(texts) if model.start else tokens, mask)

    return once(read)


@kept
def trunk_of(about: ConfigDict) -> Callable[[Sequence[str]], np.ndarray]:
    """The `trunk` (n, L, d) of texts by the encoder of an `untuned` config; each text is read once."""
    model = kept_build(about)
    return once(lambda texts: trunk(model, *_tokens(model, texts)))


def _tokens(model: Classifier, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    return pretrained.padded(model.tokenizer.encode(texts, model.length), model.length)


class PrivateClassifier:
    """A trained classifier."""

    def __init__(self, model: Classifier, trained: dict[str, Any]):
        self._model, self._trained = model, trained
        self._logits = jax.jit(lambda *arguments: model.logits(*arguments))

    def logits(self, *text: np.ndarray) -> np.ndarray:
        """(n, labels) of texts: tokens and mask, or features where the encoder is frozen."""
        own = self._trained, self._model.frozen
        return in_pieces(
            lambda rows: self._logits(*own, *(x[rows] for x in text)), len(text[0]), _PIECE
        )

    def predict(self, texts: list[str]) -> list[dict[str, float]]:
        """The probability of each label, by name, of each text."""
        model = self._model
        arrays = _tokens(model, texts)
        if model.mode == "probe":
            arrays = (frozen_features(model, *arrays),)
        odds = np.asarray(jax.nn.softmax(self.logits(*arrays)), float)
        return [dict(zip(model.labels, row.tolist(), strict=True)) for row in odds]

    def save(self, workdir: Path) -> None:
        """Saves what was trained and what is subtracted, and nothing else."""
        found = {"trained": self._trained, "center": self._model.center}
        checkpoints.save_model(workdir, found)


def load(config, workdir: Path) -> PrivateClassifier:
    """The private classifier that a run left, on the model of its config. Reads no private data."""
    model = build(config)
    saved = checkpoints.load_model(workdir, {"trained": model.trained, "center": model.center})
    return PrivateClassifier(model._replace(center=saved["center"]), saved["trained"])
