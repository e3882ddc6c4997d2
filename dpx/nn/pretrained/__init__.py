"""Pretrained models: a decoder and an encoder, which load files of Hugging Face and GGUF files."""

from pathlib import Path

from dpx.nn.pretrained.decoder import Decoder
from dpx.nn.pretrained.encoder import Encoder
from dpx.nn.pretrained.loading import Checkpoint, default_path, files, load, open_checkpoint
from dpx.nn.pretrained.saving import save, save_gguf
from dpx.nn.pretrained.settings import DecoderSettings, EncoderSettings, Rotary
from dpx.nn.pretrained.tokenizer import Tokenizer, padded


def tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a pretrained model.

    Args:
      path: A folder with config.json and tokenizer.json, or a GGUF file with byte-level BPE.

    Raises:
      FileNotFoundError: if the path does not exist.
      ModuleNotFoundError: without the packages of the extra `lm`.
      ValueError: for files that are damaged or missing, or a tokenizer that is unknown or of another model.
    """
    return open_checkpoint(path).tokenizer()


__all__ = [
    "Checkpoint",
    "Decoder",
    "DecoderSettings",
    "Encoder",
    "EncoderSettings",
    "Rotary",
    "Tokenizer",
    "default_path",
    "files",
    "load",
    "open_checkpoint",
    "padded",
    "save",
    "save_gguf",
    "tokenizer",
]
