"""The saving of models for others, adapters merged: folders for `transformers`, GGUF files for llama.cpp."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpx.nn.pretrained.families import FAMILIES, LLAMA_SETTINGS, Family
from dpx.nn.pretrained.folder import Folder
from dpx.nn.pretrained.gguf import GGUF
from dpx.nn.pretrained.layers import Layers
from dpx.nn.pretrained.loading import Checkpoint, open_checkpoint, places
from dpx.nn.pretrained.packages import needed
from dpx.nn.pretrained.settings import DecoderSettings

# The files of a tokenizer; no other file of a folder is copied.
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)


def save(model: Layers, folder: str | Path, *, source: str | Path | Checkpoint) -> None:
    """Saves a model in float32 without adapters, so that `transformers` and `load` can open it.

    Args:
      model: A `Decoder` or an `Encoder`, with or without adapters. It is not changed.
      folder: The folder, which is made if needed; files of these names in it are replaced.
      source: The checkpoint that the model was loaded from, or its path. Its settings and its tokenizer are
        copied, and so are arrays that the model does not use.

    Raises:
      ModuleNotFoundError: without the packages of the extra `lm`.
      ValueError: for a shift of a model whose last norm has no bias, since `transformers` cannot hold it.
    """
    write = needed("safetensors.numpy", "Folders of Hugging Face").save_file
    family, source = FAMILIES[model.settings.family], open_checkpoint(source)
    arrays = _placed(model, family)
    if isinstance(source, Folder):
        tied = getattr(model.settings, "tied", False)
        rest = set(source.names()) - arrays.keys() - ({family.array("head")} if tied else set())
        arrays |= {name: source.array(name) for name in rest}
        arrays = {source.stored_name(name): array for name, array in arrays.items()}
        config = {
            k: v for k, v in source.config.items() if k not in ("_name_or_path", "torch_dtype")
        }
        config["dtype"] = "float32"
    else:
        head = family.array("head")
        arrays = {k if k == head else family.prefix + k: v for k, v in arrays.items()}
        config = _of_llama(source)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if isinstance(source, Folder):
        for name in _TOKENIZER:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, folder / name)
    else:
        source.tokenizer().save(folder / "tokenizer.json")
        words = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
        (folder / "tokenizer_config.json").write_text(words + "\n", encoding="utf-8")


def save_gguf(model: Layers, path: str | Path, *, source: str | Path | Checkpoint) -> None:
    """Saves a model in a GGUF file, which is the one that it was loaded from but for the arrays that changed.

    Those are in float32. The others stay as they are quantised there, and so does the tokenizer.

    Args:
      model: A `Decoder`, with or without adapters. It is not changed.
      path: The file, which is replaced.
      source: The GGUF file that the model was loaded from, or its path.

    Raises:
      ModuleNotFoundError: without the packages of the extra `lm`.
      ValueError: for a model from a folder, or a shift (`merged`).
    """
    source = open_checkpoint(source)
    if not isinstance(source, GGUF):
        raise ValueError(
            f"source={source.path} must be a GGUF file: save a folder instead, which convert_hf_to_gguf.py "
            "of llama.cpp converts"
        )
    source.rewrite(path, _placed(model, source.family))


def _placed(model: Layers, family: Family) -> dict[str, np.ndarray]:
    """The merged arrays of a model under the names that a family has for them, as its files have them."""
    arrays = {}
    for name, stacked, value in merged(model):
        turned = value.ndim - stacked == 2 and family.is_turned(name, stacked)
        rows = list(value) if stacked else [value]
        for row, place in zip(rows, places(family, model.settings, name, stacked), strict=True):
            arrays[place] = np.ascontiguousarray(row.T if turned else row)
    return arrays


def merged(model: Layers) -> list[tuple[str, bool, np.ndarray]]:
    """The parameters of a model with adapters merged: name, whether it is stacked, and float32 numbers.

    Raises:
      ValueError: for a shift of a model whose last norm has no bias.
    """
    parameters = []
    if model.shift is not None and not hasattr(model, "norm_bias"):
        raise ValueError(
            "shift has no place in a merged model, whose last norm has no bias: save the adapters, or tune "
            "without a shift"
        )
    for name, parameter, stacked in model.own():
        value = np.array(jnp.asarray(parameter[...], jnp.float32))
        if stacked and name in model.adapters:
            pair = model.adapters[name]
            first, second = (np.asarray(pair[x][...], np.float32) for x in ("first", "second"))
            value[-len(first) :] += model.adapter_scale * first @ second
        if name == "norm_bias" and model.shift is not None:
            value += np.asarray(model.shift[...], np.float32)
        parameters.append((name, stacked, value))
    return parameters


def _of_llama(file: GGUF) -> dict[str, Any]:
    """The content of config.json for the model in a GGUF file."""
    settings: DecoderSettings = file.settings
    assert settings.rotary is not None  # as in all of this family
    if settings.rotary.factors is not None:
        raise ValueError(
            f"{file.path} divides frequencies by numbers of its own, which config.json cannot say: save the "
            "adapters, or tune the model from a folder"
        )
    stated = {key: getattr(settings, setting) for setting, key in LLAMA_SETTINGS.items()}
    config = stated | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.width,
        "rope_theta": settings.rotary.theta,
        "tie_word_embeddings": settings.tied,
        "max_position_embeddings": settings.context_length or 2048,
        "dtype": "float32",
    }
    marks = ("bos_token_id", "eos_token_id")
    return config | {name: file.get(f"tokenizer.ggml.{name}", None) for name in marks}
