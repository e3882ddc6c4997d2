"""A pretrained language model with what was tuned: how a config builds it, its loss, what a run leaves."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from dpx import _watch
from dpx.nn import lora, peft, pretrained
from dpx.nn.pretrained import Decoder, DecoderSettings
from dpx.nn.transformer import generate
from dpx.runs import card
from dpx.training import checkpoints
from experiments import checks
from experiments.dp_transformer import record_probability
from experiments.dp_transformer.documents import Bytes, Documents, check_kind
from experiments.dp_transformer.pieces import bytes_of, in_pieces, inputs

MODES = ("lora", "full")
_DEFAULT = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the model of `pretrained.default_path`
_PIECE = 16  # texts that are scored at a time, whose logits take memory


class Language(NamedTuple):
    """A model in parts, and its tokenizer: `trained` is what tuning changes, `frozen` what it does not."""

    graph: Any
    trained: nnx.State
    frozen: nnx.State
    tokenizer: Any
    length: int

    def model(self, trained: Any = None, frozen: Any = None) -> Decoder:
        """The model, by default with the parameters that it began with."""
        trained = self.trained if trained is None else trained
        return nnx.merge(self.graph, trained, self.frozen if frozen is None else frozen)


def check(config) -> None:
    """Raises ValueError for sections `model`, `tune` and `sample` that cannot be used."""
    check_kind(config.model, "model", "random")
    for name in ("model.dtype", "model.param_dtype"):
        checks.choice(config, name, ("float32", "bfloat16"))
    checks.choice(config, "tune.mode", MODES)
    checks.integers(config, "sample.count", "sample.length")


def build(config) -> Language:
    """The model that a config describes, with new adapters where it asks for them.

    Raises:
      ValueError, FileNotFoundError: for a file that cannot be used, or adapters that the model cannot have.
      ModuleNotFoundError: where a package that the file needs, or the default model, is not installed.
    """
    options = {name: config.model[name] for name in ("dtype", "param_dtype", "remat", "unroll")}
    options["frozen"] = config.tune.mode == "lora"
    if config.tune.mode == "full":  # steps are too small for what bfloat16 can tell apart
        options["param_dtype"] = "float32"
    if config.model.kind == "random":
        tokenizer, rngs = Bytes(), nnx.Rngs(config.seed)
        shape: dict[str, Any] = {"dim": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
        settings = DecoderSettings(tokenizer.vocab_size, **shape)
        model = Decoder(settings, **options, rngs=rngs)
    else:
        tokenizer, model = _pretrained(config, options)
    trained: Any = nnx.Param
    if config.tune.mode == "lora":
        attach(model, config.tune)
        trained = nnx.LoRAParam
    graph, own, frozen = nnx.split(model, trained, ...)
    return Language(graph, own, frozen, tokenizer, config.sample.length)


def attach(model: Any, tune: Any) -> None:
    """Puts the adapters on a model that a section `tune` asks for.

    Raises:
      ValueError: for adapters that the model cannot have.
    """
    names = ("target_modules", "rank", "alpha", "rslora", "train_first", "shift")
    given = {name: tune[name] for name in names if name in tune}
    try:
        lora.attach(model, **given, layers=tune.layers or None, seed=tune.adapter_seed)
    except ValueError as error:
        raise ValueError(f"config.tune.{error}") from None


def _pretrained(config, options: dict[str, Any]) -> tuple[Any, Any]:
    """The tokenizer and the model of a file or folder."""
    found = pretrained.open_checkpoint(config.model.path or pretrained.default_path())
    settings = found.settings
    if not isinstance(settings, DecoderSettings):
        raise ValueError(
            f"config.model.path={str(found.path)!r} is an encoder, which predicts no next token: "
            "use a decoder"
        )
    longest = settings.context_length
    for section in ("data", "sample"):
        if longest is not None and config[section].length > longest:
            raise ValueError(
                f"config.{section}.length={config[section].length} must be at most {longest}, the "
                f"most tokens that {found.path} was made for"
            )
    tokenizer = found.tokenizer()
    if tokenizer.start is None:
        raise ValueError(
            f"{found.path} has no token that begins a text: set bos_token_id in its config.json"
        )
    return tokenizer, pretrained.load(found, **options)


def model_files(config) -> list[np.ndarray]:
    """The bytes of the files that the model is read from; none of a random one, which the config describes.

    What is released is computed with the model, so that a run that resumes has to find the same one.
    """
    if config.model.kind == "random":
        return []
    return bytes_of(config.model.path or pretrained.default_path())


def trunk(language: Language, documents: Documents) -> np.ndarray:
    """What enters the first layer that is tuned, (n, L, d), of each document alone."""
    run = jax.jit(lambda frozen, tokens: language.model(frozen=frozen).trunk(tokens))
    before = inputs(language.tokenizer, documents.tokens)
    return in_pieces(lambda rows: run(language.frozen, before[rows]), len(before), _PIECE)


def as_bits(x: np.ndarray) -> np.ndarray:
    """Numbers of bfloat16 as integers of their bits, others as they are: what `loss` may be given.

    Before XLA takes rows of such numbers on a CPU, it makes a float32 copy of all of them.
    """
    return x.view(np.uint16) if x.dtype == jnp.bfloat16 else x


def loss(language: Language, trained, frozen, before, targets, mask, key):
    """Nats of one record over the width, not its length, so that a token counts the same in all.

    `before` are the tokens before the targets, (L,), or what `trunk` makes of them, (L, d). Nothing is
    random, so the `key` is not used.
    """
    del key
    model = language.model(trained, frozen)
    if before.ndim == 1:
        x = model.trunk(before)
    else:
        bits = before.dtype == jnp.uint16
        x = lax.bitcast_convert_type(before, jnp.bfloat16) if bits else before
    return _nats(model.logits(x), targets, mask).sum() / len(targets)


def _nats(logits, targets, mask):
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) - picked, 0)


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph, trained, frozen, tokens):
    return nnx.merge(graph, trained, frozen)(tokens)


@functools.partial(jax.jit, static_argnums=0)
def _score(graph, trained, frozen, before, tokens, mask):
    return _nats(nnx.merge(graph, trained, frozen)(before), tokens, mask).sum(axis=1)


class TunedText:
    """A language model: scores and samples texts."""

    def __init__(self, language: Language, trained: Any, config: Any):
        self._language, self._trained, self._config = language, trained, config
        self._logits = functools.partial(_logits, language.graph, trained, language.frozen)

    def nats(
        self, documents: Documents, assumption: str | None = record_probability.ASSUMPTION
    ) -> np.ndarray:
        """(n,) nats that each document costs: −log of its probability.

        Args:
          documents: n of them.
          assumption: What a guarantee says of their number, None where none rests on it.
        """
        language, count, size = self._language, len(documents), _PIECE
        before = inputs(language.tokenizer, documents.tokens)
        if documents.users is None:  # how many documents users have is not public
            size = min(size, _watch.public(count, assumption))

        def nats(rows: np.ndarray) -> jax.Array:
            part = (before[rows], documents.tokens[rows], documents.mask[rows])
            return _score(language.graph, self._trained, language.frozen, *part)

        return in_pieces(nats, count, size)

    def log_prob(self, texts: list[str]) -> np.ndarray:
        """(n,) log-probability of each text in nats; lower its case if the model was tuned on lower case."""
        found = self._language.tokenizer.encode(texts)
        longest = max(1, *map(len, found))
        return -self.nats(Documents(*pretrained.padded(found, longest)), None)

    def sample(self, key: jax.Array, count: int) -> list[str]:
        """`count` texts drawn from the model, of config.sample.length tokens each."""
        language = self._language
        drawn = generate(self._logits, key, count, language.length, start=language.tokenizer.start)
        return [language.tokenizer.decode(row) for row in np.asarray(drawn)]

    def export(self, folder: Path, *, form: str, base: str | None) -> card.Model:
        """Writes what was tuned for `peft`, `transformers` or llama.cpp: adapters, or a whole model.

        Args:
          folder: Is made.
          form: "adapters", or all of the model with adapters in it: "merged", a folder, or "gguf".
          base: The name of the pretrained model, by default that of its folder or file.

        Raises:
          ValueError: for a random model, adapters where all parameters were tuned, a whole model of which a
            shift is a part, or a GGUF file of a model from a folder.
        """
        language, config = self._language, self._config
        if config.model.kind == "random":
            raise ValueError(
                "config.model.kind='random' must be 'pretrained': nobody else has this model"
            )
        path, named = config.model.path, _DEFAULT
        if path is not None:
            place = Path(path).resolve()
            named = place.name if place.is_dir() else place.stem
        model, base = language.model(self._trained), base or named
        if form != "adapters":
            source = pretrained.open_checkpoint(path or pretrained.default_path())
            if form == "merged":
                pretrained.save(model, folder, source=source)
                return card.Model(base=base, library="transformers")
            folder.mkdir(parents=True, exist_ok=True)
            pretrained.save_gguf(model, folder / "model.gguf", source=source)
            return card.Model(base=base, library="gguf")
        if config.tune.mode == "full":
            raise ValueError("config.tune.mode='full' changed all parameters: give --merged")
        peft.save(model, folder, base=base)
        return card.Model(base=base, library="peft")

    def save(self, workdir: Path) -> None:
        """Saves what was tuned, and nothing else."""
        checkpoints.save_model(workdir, {"trained": self._trained})


def load(config, workdir: Path) -> TunedText:
    """The private model that a run left, on the pretrained one of its config. Reads no private data."""
    language = build(config)
    saved = checkpoints.load_model(workdir, {"trained": language.trained})
    return TunedText(language, saved["trained"], config)
