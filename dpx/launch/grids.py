"""The grid of a sweep: which points it has, and which of them a shard runs."""

import itertools
import re
from collections.abc import Collection

import yaml

from dpx.launch import records, sources


def grid(source: str, axes: list[str], fixed: Collection[str] = ()) -> list[dict]:
    """The points of a grid as overrides by dotted name.

    Args:
      source: The config file, with its argument.
      axes: `key=v1,v2` each; none means the config's own `sweep(arg)`, without what is fixed.
      fixed: The keys that have one value at all points.

    Raises:
      ValueError: for an axis without values, a value that is none, a key that cannot be set or is fixed, or
        several points that would draw their noise from one noise_seed.
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
            if any(chosen[name].count(value) > 1 for value in chosen[name]):
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
    found = [
        dict(zip(chosen, values, strict=True)) for values in itertools.product(*chosen.values())
    ]
    if len(found) > 1 and config.noise_seed is not None:
        raise ValueError(
            f"{source} sets config.noise_seed, under which all {len(found)} points draw the same noise, "
            "which cancels in their differences: leave it out"
        )
    return found


def _parse(value: str, axis: str):
    if not value:
        raise ValueError(f"empty value in --set={axis}")
    try:
        if tuple_ := re.fullmatch(r"\((.*)\)", value):
            value = f"[{tuple_[1]}]"
        found = yaml.safe_load(value)
        return tuple(found) if isinstance(found, list) else found
    except yaml.YAMLError:
        raise ValueError(
            f"--set={axis}: {value!r} is not a value; commas separate values"
        ) from None


def shard(found: list[dict], text: str) -> list[dict]:
    """Every N-th point, from the I-th on, where `text` is I/N; all of them where it is empty.

    Raises:
      ValueError: for anything else.
    """
    if not text:
        return found
    parts = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not parts or not 1 <= int(parts[1]) <= int(parts[2]):
        raise ValueError(
            f"--shard={text} must be I/N with I from 1 to N: write 1/4, …, 4/4 for four shards"
        )
    return found[int(parts[1]) - 1 :: int(parts[2])]
