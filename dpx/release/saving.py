"""Releases in files: `save` writes a release with its guarantee, and `load` reads it in any process.

A file is a zip archive: `dpx.json` describes the release, and `0.npy`, `1.npy`, … are its arrays, which
`np.load` reads too. Nothing is pickled. Only types that `dpx.release.encoding` names can be saved, and
loading never imports or calls what a file names.
"""

import errno
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

from dpx import _storage as storage
from dpx._version import __version__
from dpx.release.encoding import RELEASES, decode, encode, filled, is_one_of

_FORMAT, _VERSION, _HEADER = "dpx release", 1, "dpx.json"
_REMEDY = "restore it from a copy, or save the release again"


def save(release: Any, path: str | Path) -> None:
    """Writes a release with its guarantee to a file, which replaces `path` once it is complete.

    Code is not saved. An NNX module comes back as its `nnx.State`, a NamedTuple of yours with the same fields
    but another class, and an Equinox module or another tree as a dict of arrays by name (`layers/0/weight`);
    `load(path, like=model)` makes a model of them. Keys of random numbers are left out. So is the `history`
    of training: its losses are computed on private data, and no guarantee covers them.

    Args:
      release: What a mechanism of dpx returned (a `GramRelease`, `Sketch`, `Trees`, `DPTree`,
        `DPTreeDistance`, `DPTreeHighDim`, `Popularity`, `Transitions`, `ItemGram`, `NGram`, `Fit`,
        `TokenProbabilities`, or the answers of a baseline), or what `dpx.training.fit` returned.
      path: The file, of any name.

    Raises:
      ValueError: for anything that is not a release, above all private data; for a part of a type that cannot
        be saved; and under `jit`.
      OSError: naming the file, if it cannot be written.
    """
    name = type(release).__name__
    if not is_one_of(RELEASES, release):
        encode(release, name, [])  # private data get an error that says so
        raise ValueError(
            f"{name} is no release and has no guarantee: dpx.save takes {', '.join(RELEASES)}"
        )
    arrays: list[bytes] = []
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "dpx": __version__,
        "release": encode(release, name, arrays),
        "arrays": len(arrays),
    }
    header = json.dumps({**content, "sha256": _checksum(content, arrays)}, indent=1)
    with storage.replacing(Path(path)) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(_HEADER), header)
        for number, array in enumerate(arrays):
            archive.writestr(zipfile.ZipInfo(f"{number}.npy"), array)


def load(path: str | Path, *, like: Any = None) -> Any:
    """The release that `save` wrote, with its guarantee and arrays of the same types, 64-bit ones included.

        model = dpx.load("model.dpx", like=nnx.Linear(64, 10, rngs=nnx.Rngs(0))).params

    Args:
      path: The file.
      like: For what `dpx.training.fit` returned, a model or tree of the same structure as its parameters,
        which come back in that structure.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a file that `save` did not write, one of a newer dpx, or a damaged one; for a `like`
        with other arrays, or for a release that has no parameters.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; dpx.load reads what dpx.save wrote")
    with path.open("rb") as file:
        start = file.read(30 + len(_HEADER))
    if not (start.startswith(b"PK") and start.endswith(_HEADER.encode())):
        raise storage.StorageError(
            f"{path} is no file of dpx.save: give one that it wrote, or read this one with what made it"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read(_HEADER))
            if header["version"] > _VERSION:
                raise storage.StorageError(
                    f"{path} was written by dpx {header['dpx']}, which is newer than this one "
                    f"({__version__}): install that version"
                )
            arrays = [archive.read(f"{number}.npy") for number in range(header["arrays"])]
        stated = header.pop("sha256")
        if stated != _checksum(header, arrays):
            raise storage.damaged(path, _REMEDY)
    except storage.StorageError:
        raise
    except Exception as error:  # zipfile raises many types for bytes that were changed
        # A file that lacks bytes makes zipfile seek before its start, which is an OSError with EINVAL.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise storage.damaged(path, _REMEDY) from None
    try:
        release = decode(header["release"], arrays)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise storage.StorageError(
            f"{path} was written by dpx {header['dpx']} and holds what this one ({__version__}) cannot "
            f"build ({error}): load it with the version that wrote it"
        ) from None
    if like is None:
        return release
    if not hasattr(release, "params"):
        raise ValueError(
            f"like must be left out: {path} holds a {type(release).__name__}, which has no parameters"
        )
    try:
        return release._replace(params=filled(like, release.params))
    except ValueError as error:
        raise ValueError(f"{error}: give a model like that which was trained in {path}") from None


def _checksum(content: dict, arrays: list[bytes]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for array in arrays:
        digest.update(hashlib.sha256(array).digest())
    return digest.hexdigest()
