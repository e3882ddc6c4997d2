"""Folders of models as `transformers` saves them (tests/hugging_face/make.py), and changed copies of them."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent / "hugging_face"
ENCODERS = ("bert", "roberta", "distilbert")
CLASSIFIERS = tuple(f"{name}_classifier" for name in ENCODERS)
WINDOWED = ("mistral", "qwen2_windows", "gemma3")
DECODERS = ("gpt2", "llama", "llama3_rope", "llama_biased", "qwen2", "qwen3", *WINDOWED)


def reference(name):
    """The tokens, mask and outputs of a folder."""
    found = load_file(HERE / name / "reference.safetensors")
    return found["tokens"], found["mask"].astype(bool), found["outputs"]


def changed(folder, name, *, config=(), left_out=(), arrays=None):
    """A copy of a folder with other settings, without some, and with other arrays."""
    shutil.copytree(HERE / name, folder)
    path = folder / "config.json"
    found = json.loads(path.read_text()) | dict(config)
    path.write_text(json.dumps({k: v for k, v in found.items() if k not in left_out}))
    if arrays is not None:
        weights = folder / "model.safetensors"
        save_file(
            {k: np.ascontiguousarray(v) for k, v in arrays(load_file(weights)).items()}, weights
        )
    return folder


def with_letters(folder, name="llama", **changes):
    """A copy of a folder that has a tokenizer of single letters, with other settings."""
    import tokenizers

    changed(folder, name, **changes)
    letters = {letter: number for number, letter in enumerate("Ġabcdefghijklmnopqrstuvwxyz")}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.save(str(folder / "tokenizer.json"))
    return folder


def sharded(folder, name):
    """A copy of a folder whose arrays are in two files, and an index."""
    changed(folder, name)
    found = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    placed = {}
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        part = dict(list(found.items())[number - 1 :: 2])
        placed |= dict.fromkeys(part, file)
        save_file(part, folder / file)
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
