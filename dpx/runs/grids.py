"""The points of a sweep's grid, and the points that a shard runs."""

import contextlib
import itertools
import re
from collections.abc import Collection
from typing import Any

import yaml

from dpx.runs import records, sources


def grid(source: str, axes: list[str], fixed: Collection[str] = ()) -> list[dict]:
    """The points of a grid as overrides by dotted name.

    Args:
      source: The config file, with its argument.
      axes: Axes of the form `key=v1,v2`. If there are none, those of the config's `sweep(arg)`, without fixed
        keys.
      fixed: The keys that have one value at all points.

    Raises:
      ValueError: for an axis without values, a value that cannot be parsed, a key that is unknown or fixed,
        or several points that would draw their noise from one noise_seed.
    """
    if axes:
        chosen = {}
        for axis in axes:
            name, equals, values = axis.partition("=")
            if not equals:
                raise ValueError(f"--set={axis} must be key=v1,v2")
            if name in chosen:
                raise ValueError(f"--set={name}=… is given twice: put all values in one --set")
            # A comma inside brackets is part of a tuple: ngrams=[1,2],[] or ngrams=(1,2),()
            parts = re.split(r",(?![^\[]*\])(?![^(]*\))", values)
            chosen[name] = [_parse(value, axis) for value in parts]
            read = [*map(_number, chosen[name])]
            if any(read.count(value) > 1 for value in read):
                raise ValueError(
                    f"--set={axis} must not hold one value twice, which would be paid for twice: vary "
                    "seed to repeat a run"
                )
    else:
        module = records.config_module(source)
        if not callable(getattr(module, "sweep", None)):
            raise ValueError(
                f"{source} has no function sweep: give the grid, as in --set=epsilon=1,2"
            )
        swept = sources.call(module, "sweep", source)
        chosen = {name: values for name, values in swept.items() if name not in fixed}
    config = records.load_config(source)
    known = records.flatten(config.to_dict())
    for name in chosen:
        records.check_key(name, known, source)
        if name == "experiment":
            raise ValueError("--set=experiment=… is fixed by the config file: use another --config")
        if name in fixed:
            raise ValueError(
                f"--set={name}=… is also given as --config.{name}: leave one of them out"
            )
    if "noise_seed" in {*chosen, *fixed}:
        raise ValueError(
            "noise_seed=… must not be given to a sweep, whose points would share their noise or have a "
            "secret in their names: give it to dpx run, for one run at a time, or leave it out"
        )
    points = [
        dict(zip(chosen, values, strict=True)) for values in itertools.product(*chosen.values())
    ]
    if len(points) > 1 and config.noise_seed is not None:
        raise ValueError(
            f"{source} sets config.noise_seed, under which all {len(points)} points draw the same noise, "
            "which cancels in their differences: leave it out"
        )
    return points


def _parse(value: str, axis: str):
    if not value:
        raise ValueError(f"empty value in --set={axis}")
    try:
        if tuple_ := re.fullmatch(r"\((.*)\)", value):
            value = f"[{tuple_[1]}]"
        parsed = yaml.safe_load(value)
        return tuple(parsed) if isinstance(parsed, list) else parsed
    except yaml.YAMLError:
        raise ValueError(
            f"--set={axis}: {value!r} is not a value; commas separate values"
        ) from None


def _number(value: Any) -> Any:
    """A value as a key of numbers reads it: YAML takes 1e-3 for text."""
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def shard(points: list[dict], text: str) -> list[dict]:
    """Every N-th point, beginning with the I-th, for a `text` I/N; all points for an empty one.

    Raises:
      ValueError: for any other text.
    """
    if not text:
        return points
    parts = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not parts or not 1 <= int(parts[1]) <= int(parts[2]):
        raise ValueError(
            f"--shard={text} must be I/N with I from 1 to N: write 1/4, …, 4/4 for four shards"
        )
    return points[int(parts[1]) - 1 :: int(parts[2])]
