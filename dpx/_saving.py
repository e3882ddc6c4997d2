"""Releases in files: `save` keeps one with its guarantee, and `load` brings it back in any other process.

A file is a zip archive: `dpx.json` says what the release is made of, and `0.npy`, `1.npy`, … are its arrays,
which NumPy's own `np.load` reads too. Nothing is pickled. Only the types that are named here can be saved,
and loading never imports or calls what a file names.
"""

import dataclasses
import errno
import hashlib
import importlib
import io
import json
import math
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from flax import nnx
from jax.core import Tracer

from dpx import _storage as storage

_FORMAT, _VERSION, _HEADER = "dpx release", 1, "dpx.json"
_REMEDY = "restore it from a copy, or save the release again"

# Where each type that can be saved is found. The first group are releases, the others parts of releases.
_RELEASES = {
    "Answers": "dpx.cross_attention.baselines",
    "DPTree": "dpx.cross_attention",
    "DPTreeDistance": "dpx.cross_attention",
    "DPTreeHighDim": "dpx.cross_attention",
    "Fit": "dpx.noisy_head",
    "GramRelease": "dpx.gram",
    "ItemGram": "dpx.recommend.item_gram",
    "NGram": "dpx.ngram",
    "Popularity": "dpx.recommend.popularity",
    "Sketch": "dpx.cross_attention",
    "TokenProbabilities": "dpx.reattention",
    "Trained": "dpx.training",
    "Transitions": "dpx.recommend.transitions",
    "Trees": "dpx.cross_attention",
}
_TYPES = _RELEASES | {
    "Domain": "dpx.cross_attention",
    "PolynomialFeatures": "dpx.cross_attention",
    "PrivacyGuarantee": "dpx.privacy",
    "RandomFeatures": "dpx.cross_attention",
}
_PRIVATE = {
    "ClippedGrads": "dpx.clipping",
    "Features": "dpx.noisy_head",
    "Histories": "dpx.data.histories",
    "Partial": "dpx.partial",
    "Prompts": "dpx.noisy_head",
    "Split": "dpx.data.histories",
}
# Losses and evaluations of a training run are computed on private data and covered by no guarantee.
_LEFT_OUT = {("Trained", "history"): []}
_VARIABLES = {"BatchStat": nnx.BatchStat, "Param": nnx.Param, "Variable": nnx.Variable}
_EVENTS = {
    name: getattr(dp_event, name)
    for name in (
        "ComposedDpEvent",
        "GaussianDpEvent",
        "LaplaceDpEvent",
        "NoOpDpEvent",
        "PoissonSampledDpEvent",
        "RepeatAndSelectDpEvent",
        "SelfComposedDpEvent",
        "TruncatedSubsampledGaussianDpEvent",
        "ZCDpEvent",
    )
}


def save(release: Any, path: str | Path) -> None:
    """Writes a release with its guarantee to a file, which takes the place of `path` once it is complete.

    Args:
      release: What a mechanism of dpx returned (a `GramRelease`, `Sketch`, `Trees`, `DPTree`,
        `DPTreeDistance`, `DPTreeHighDim`, `Popularity`, `Transitions`, `ItemGram`, `NGram`, `Fit`,
        `TokenProbabilities`, or the answers of a baseline), or what `dpx.training.fit` returned. Parameters
        may be nested dicts, lists, tuples and NamedTuples of arrays, or an `nnx.State`. A NamedTuple of
        yours comes back with the same fields, but not as the same class. The `history` of training is left
        out, since its losses are computed on private data and are covered by no guarantee.
      path: The file, of any name.

    Raises:
      ValueError: for anything that is no release, above all for private data; for a part of another type; and
        under `jit`.
      OSError: naming the file, if it cannot be written.
    """
    name = type(release).__name__
    if not _is_one_of(_RELEASES, release):
        _encode(release, name, [])  # private data get an error that says so
        raise ValueError(
            f"{name} is no release and has no guarantee: dpx.save takes {', '.join(_RELEASES)}"
        )
    arrays: list[bytes] = []
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "dpx": _dpx_version(),
        "release": _encode(release, name, arrays),
        "arrays": len(arrays),
    }
    header = json.dumps({**content, "sha256": _checksum(content, arrays)}, indent=1)
    with storage.replacing(Path(path)) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(_HEADER), header)
        for number, array in enumerate(arrays):
            archive.writestr(zipfile.ZipInfo(f"{number}.npy"), array)


def load(path: str | Path) -> Any:
    """The release that `save` wrote, with its guarantee and arrays of the same types, 64-bit ones included.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for a file of something else, of a newer dpx, or a damaged one.
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
                    f"({_dpx_version()}): install that version"
                )
            arrays = [archive.read(f"{number}.npy") for number in range(header["arrays"])]
        stated = header.pop("sha256")
        if stated != _checksum(header, arrays):
            raise storage.damaged(path, _REMEDY)
    except storage.StorageError:
        raise
    except Exception as error:  # zipfile raises many types for bytes that were changed
        # Where bytes are missing, it looks for others before the file's first.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise storage.damaged(path, _REMEDY) from None
    try:
        return _decode(header["release"], arrays)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise storage.StorageError(
            f"{path} was written by dpx {header['dpx']} and holds what this one ({_dpx_version()}) cannot "
            f"build ({error}): load it with the version that wrote it"
        ) from None


def _encode(value: Any, place: str, arrays: list[bytes]) -> Any:
    """JSON for a value; its arrays are appended to `arrays`. `place` says in errors where it was found."""
    if _is_one_of(_PRIVATE, value):
        raise ValueError(
            f"{place} holds private records, which no guarantee covers: save what was released about them"
        )
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return _encode_array(value, place, arrays)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    name = type(value).__name__
    if isinstance(value, NeighboringRelation):
        return {"relation": value.name}
    if _EVENTS.get(name) is type(value):
        fields = {field.name: getattr(value, field.name) for field in value.__attrs_attrs__}
        return {"event": name, "fields": _encode_fields(fields, place, arrays)}
    if _is_one_of(_TYPES, value):
        names = getattr(value, "_fields", None) or [f.name for f in dataclasses.fields(value)]
        fields = {field: getattr(value, field) for field in names}
        fields |= {field: empty for (owner, field), empty in _LEFT_OUT.items() if owner == name}
        return {"type": name, "fields": _encode_fields(fields, place, arrays)}
    if _VARIABLES.get(name) is type(value):
        return {"variable": name, "value": _encode(value[...], place, arrays)}
    if isinstance(value, nnx.State):
        return {"state": _encode(dict(value), place, arrays)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {
            "namedtuple": name,
            "fields": _encode_fields(value._asdict(), place, arrays),  # type: ignore[attr-defined]
        }
    if type(value) in (list, tuple):
        kind = type(value).__name__
        return {kind: [_encode(v, f"{place}[{i}]", arrays) for i, v in enumerate(value)]}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        pairs = [[key, _encode(v, f"{place}[{key!r}]", arrays)] for key, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, nnx.Module):
        raise ValueError(
            f"{place} is the Flax module {name}, whose code is not saved: save its arrays, "
            "trained._replace(params=nnx.state(trained.params)), and nnx.update a new module with them"
        )
    raise ValueError(
        f"{place} is of type {name}, which cannot be saved: use numbers, arrays, and dicts, lists, tuples or "
        "NamedTuples of them"
    )


def _encode_fields(fields: dict[str, Any], place: str, arrays: list[bytes]) -> dict[str, Any]:
    return {name: _encode(value, f"{place}.{name}", arrays) for name, value in fields.items()}


def _encode_array(value: Any, place: str, arrays: list[bytes]) -> dict:
    if isinstance(value, Tracer):
        raise ValueError(f"{place} is traced: call dpx.save outside jit, vmap and grad")
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise ValueError(f"{place} is a JAX key, which is a secret: keys are never saved")
    kind = "jax" if isinstance(value, jax.Array) else "numpy"
    kind = "scalar" if isinstance(value, np.generic) else kind
    array = np.asarray(value)
    found: dict[str, Any] = {"array": len(arrays), "kind": kind}
    if array.dtype == jnp.bfloat16:  # which the .npy format does not know
        found["bfloat16"], array = True, array.view(np.uint16)
    if array.dtype.kind not in "biufcSU":
        raise ValueError(f"{place} holds {array.dtype}, which cannot be saved: use numbers or text")
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    arrays.append(buffer.getvalue())
    return found


def _decode(node: Any, arrays: list[bytes]) -> Any:
    if node is None or isinstance(node, bool | int | float | str):
        return node
    match node:
        case {"array": number, "kind": kind}:
            array = np.load(io.BytesIO(arrays[number]), allow_pickle=False)
            array = array.view(jnp.bfloat16) if "bfloat16" in node else array
            with jax.enable_x64(True):  # or 64-bit arrays would lose half of their bits
                return (
                    jnp.asarray(array)
                    if kind == "jax"
                    else array[()]
                    if kind == "scalar"
                    else array
                )
        case {"float": text}:
            return float(text)
        case {"relation": name}:
            return NeighboringRelation[name]
        case {"event": name, "fields": fields}:
            return _EVENTS[name](**_decode_fields(fields, arrays))
        case {"type": name, "fields": fields}:
            return _class(_TYPES, name)(**_decode_fields(fields, arrays))
        case {"variable": name, "value": value}:
            return _VARIABLES[name](_decode(value, arrays))
        case {"state": content}:
            return nnx.State(_decode(content, arrays))
        case {"namedtuple": name, "fields": fields}:
            return namedtuple(name, fields)(**_decode_fields(fields, arrays))
        case {"list": items}:
            return [_decode(item, arrays) for item in items]
        case {"tuple": items}:
            return tuple(_decode(item, arrays) for item in items)
        case {"dict": pairs}:
            return {key: _decode(value, arrays) for key, value in pairs}
    raise ValueError(f"an entry {str(node)[:40]}")


def _decode_fields(fields: dict[str, Any], arrays: list[bytes]) -> dict[str, Any]:
    return {name: _decode(value, arrays) for name, value in fields.items()}


def _is_one_of(known: dict[str, str], value: Any) -> bool:
    name = type(value).__name__
    return name in known and type(value) is _class(known, name)


def _class(known: dict[str, str], name: str) -> Any:
    return getattr(importlib.import_module(known[name]), name)


def _checksum(content: dict, arrays: list[bytes]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for array in arrays:
        digest.update(hashlib.sha256(array).digest())
    return digest.hexdigest()


def _dpx_version() -> str:
    return importlib.import_module("dpx").__version__
