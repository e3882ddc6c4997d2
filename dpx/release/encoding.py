"""The encoding of releases as JSON and arrays, and back, for the types that `dpx.save` takes.

Nothing is pickled, and decoding never imports or calls what a file names.
"""

import dataclasses
import importlib
import io
import math
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from flax import nnx
from jax.core import Tracer

from dpx.privacy.allocation import AllocatedGaussianDpEvent

# The module of each type that can be saved. The first group are releases, the others parts of releases.
RELEASES = {
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
_TYPES = RELEASES | {
    "Domain": "dpx.cross_attention",
    "PolynomialFeatures": "dpx.cross_attention",
    "PrivacyGuarantee": "dpx.privacy",
    "RandomFeatures": "dpx.cross_attention",
}
_PRIVATE = {
    "ClippedGrads": "dpx.clipping",
    "Features": "dpx.noisy_head",
    "Histories": "dpx.data.histories",
    "Partial": "dpx.release",
    "Prompts": "dpx.noisy_head",
    "Split": "dpx.data.histories",
}
# Losses and evaluations of a training run are computed on private data and covered by no guarantee.
_LEFT_OUT = {("Trained", "history"): []}
# All variables of NNX, such as nnx.LoRAParam, but those of random numbers, which are not saved.
_VARIABLES = {
    name: kind
    for name, kind in vars(nnx).items()
    if isinstance(kind, type) and issubclass(kind, nnx.Variable)
}
_EVENTS = {AllocatedGaussianDpEvent.__name__: AllocatedGaussianDpEvent} | {
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


def encode(value: Any, place: str, arrays: list[bytes]) -> Any:
    """A value as JSON; its arrays are appended to `arrays`. `place` is where the value stands, for errors."""
    if is_one_of(_PRIVATE, value):
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
    if is_one_of(_TYPES, value):
        names = getattr(value, "_fields", None) or [f.name for f in dataclasses.fields(value)]
        fields = {field: getattr(value, field) for field in names}
        fields |= {field: empty for (owner, field), empty in _LEFT_OUT.items() if owner == name}
        return {"type": name, "fields": _encode_fields(fields, place, arrays)}
    if isinstance(value, nnx.Variable):
        # A variable of the user's own type comes back as the type of NNX that it derives from.
        kind = next(k.__name__ for k in type(value).__mro__ if _VARIABLES.get(k.__name__) is k)
        return {"variable": kind, "value": encode(value[...], place, arrays)}
    if isinstance(value, nnx.Module):
        value = nnx.state(value)
    if isinstance(value, nnx.State):
        value = nnx.filter_state(value, nnx.Not(nnx.RngState))
        return {"state": encode(dict(value), place, arrays)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {
            "namedtuple": name,
            "fields": _encode_fields(value._asdict(), place, arrays),  # type: ignore[attr-defined]
        }
    if type(value) in (list, tuple):
        kind = type(value).__name__
        return {kind: [encode(v, f"{place}[{i}]", arrays) for i, v in enumerate(value)]}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        pairs = [[key, encode(v, f"{place}[{key!r}]", arrays)] for key, v in value.items()]
        return {"dict": pairs}
    if not jax.tree_util.all_leaves([value]):
        named = by_path(value)
        return {"dict": [[k, encode(v, f"{place}/{k}", arrays)] for k, v in named.items()]}
    raise ValueError(
        f"{place} is of type {name}, which cannot be saved: use numbers, arrays, and dicts, lists, tuples or "
        "NamedTuples of them, or modules of Flax or Equinox"
    )


def by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by name, such as `layers/0/weight`; private records are leaves.

    Raises:
      ValueError: for two arrays of one name.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: is_one_of(_PRIVATE, x))
    named: dict[str, Any] = {}
    for path, leaf in leaves:
        if _is_array(leaf) or is_one_of(_PRIVATE, leaf):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if name in named:
                raise ValueError(f"{name} must be the path of one array, and is of two: rename one")
            named[name] = leaf
    return named


def filled(like: Any, tree: Any) -> Any:
    """The tree `like`, with each of its arrays replaced by the array of the same name in `tree`.

    Raises:
      ValueError: unless both have arrays of the same names and shapes. Only `like` may have keys and counters
        of random numbers beside these.
    """
    arrays = by_path(tree)

    def taken(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not _is_array(leaf):
            return leaf
        if name not in arrays:
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise ValueError(f"like has an array {name}, which was not saved")
            return leaf
        saved = arrays.pop(name)
        if saved.shape != leaf.shape:
            raise ValueError(f"like has {name} of shape {leaf.shape}, and {saved.shape} was saved")
        return saved

    made = jax.tree_util.tree_map_with_path(taken, like)
    if arrays:
        raise ValueError(f"like has no array {next(iter(arrays))}, which was saved")
    return made


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.generic | np.ndarray | jax.Array)


def _encode_fields(fields: dict[str, Any], place: str, arrays: list[bytes]) -> dict[str, Any]:
    return {name: encode(value, f"{place}.{name}", arrays) for name, value in fields.items()}


def _encode_array(value: Any, place: str, arrays: list[bytes]) -> dict:
    if isinstance(value, Tracer):
        raise ValueError(f"{place} is traced: call dpx.save outside jit, vmap and grad")
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise ValueError(f"{place} is a JAX key, which is a secret: keys are never saved")
    kind = "jax" if isinstance(value, jax.Array) else "numpy"
    kind = "scalar" if isinstance(value, np.generic) else kind
    array = np.asarray(value)
    node: dict[str, Any] = {"array": len(arrays), "kind": kind}
    if array.dtype == jnp.bfloat16:  # which the .npy format does not know
        node["bfloat16"], array = True, array.view(np.uint16)
    if array.dtype.kind not in "biufcSU":
        raise ValueError(f"{place} holds {array.dtype}, which cannot be saved: use numbers or text")
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    arrays.append(buffer.getvalue())
    return node


def decode(node: Any, arrays: list[bytes]) -> Any:
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
            return _VARIABLES[name](decode(value, arrays))
        case {"state": content}:
            return nnx.State(decode(content, arrays))
        case {"namedtuple": name, "fields": fields}:
            return namedtuple(name, fields)(**_decode_fields(fields, arrays))
        case {"list": items}:
            return [decode(item, arrays) for item in items]
        case {"tuple": items}:
            return tuple(decode(item, arrays) for item in items)
        case {"dict": pairs}:
            return {key: decode(value, arrays) for key, value in pairs}
    raise ValueError(f"an entry {str(node)[:40]}")


def _decode_fields(fields: dict[str, Any], arrays: list[bytes]) -> dict[str, Any]:
    return {name: decode(value, arrays) for name, value in fields.items()}


def is_one_of(known: dict[str, str], value: Any) -> bool:
    name = type(value).__name__
    return name in known and type(value) is _class(known, name)


def _class(known: dict[str, str], name: str) -> Any:
    return getattr(importlib.import_module(known[name]), name)
