"""One run in several processes of `jax.distributed`, of which the first reads and writes files for all."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


class FirstProcessError(ValueError):
    """The error that ended the first process, raised in the other processes."""


def join(coordinator: str | None, count: int | None, number: int | None) -> None:
    """Makes this process one of several, before it has used a device.

    Args:
      coordinator: HOST:PORT of the first process.
      count: How many processes there are.
      number: The number of this process. All three are None where the cluster's environment states them.

    Raises:
      ValueError: if JAX cannot find the other processes.
    """
    try:
        jax.distributed.initialize(coordinator, count, number)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"coordinator={coordinator}, processes={count}, process={number} must say how to find the other "
            f"processes: give all three, or none on a cluster that JAX knows ({error})"
        ) from None


def several() -> bool:
    """Whether other processes compute the same run."""
    # `process_count` alone would start the devices of a process that may not need any.
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that writes records and logs, and prints the progress."""
    return not several() or jax.process_index() == 0


def of_first(compute: Callable[[], Any]) -> Any:
    """Runs `compute` in the first process only, and returns its result in all processes.

    Args:
      compute: Returns a value that JSON can hold. All processes wait for it.

    Raises:
      ValueError, OSError: in the first process, where `compute` raises one.
      FirstProcessError: in the others, with its text.
    """
    if not several():
        return compute()
    error, message = None, None
    if is_first():
        try:
            message = {"result": compute()}
        except (ValueError, OSError) as raised:
            error, message = raised, {"error": str(raised)}
    message = of_each(message)[0]
    if "error" in message:
        raise error or FirstProcessError(message["error"])
    return message["result"]


def of_all(x: np.ndarray) -> np.ndarray:
    """The arrays x of all processes, stacked in their order; they have one shape and numbers below 2³¹."""
    return np.asarray(multihost_utils.process_allgather(x)) if several() else x[None]


def of_each(value: Any) -> list:
    """The values of all processes, in their order; each is one that JSON can hold."""
    if not several():
        return [value]
    own = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = of_all(np.array(len(own), np.int32))
    rows = of_all(np.pad(own, (0, int(sizes.max()) - len(own)))).astype(np.uint8)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def check_same(settings: Mapping[str, Any]) -> None:
    """Raises ValueError in all processes if one of them has other settings than the first.

    Each process clips the gradients of its own records, but states the guarantee for the records of all.

    Args:
      settings: The settings by name, values that JSON can hold.
    """
    first, *others = of_each(dict(settings))
    different = {
        name
        for other in others
        for name in first | other
        if (name in first, first.get(name)) != (name in other, other.get(name))
    }
    if different:
        raise ValueError(
            f"{', '.join(sorted(different))} must be the same in all processes: start each of them with the "
            "same arguments"
        )
