"""One run in several processes, as `jax.distributed` starts them: the first reads and writes for all."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


class FirstProcessError(ValueError):
    """What ended the first process, in another one."""


def join(coordinator: str | None, count: int | None, number: int | None) -> None:
    """Makes this process one of several, before it has used a device.

    Args:
      coordinator: HOST:PORT of the first process.
      count: How many processes there are.
      number: Which of them this is. All three are None where the cluster's environment says it.

    Raises:
      ValueError: where something is missing.
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
    # Asking for their number would start the devices of a process that may not need any.
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that writes records and logs, and says how far the run is."""
    return not several() or jax.process_index() == 0


def of_first(compute: Callable[[], Any]) -> Any:
    """What `compute` returns in the first process, in all of them; no other calls it, and all wait for it.

    Args:
      compute: Returns what JSON holds.

    Raises:
      ValueError, OSError: in the first process, where `compute` raises one.
      FirstProcessError: in the others, with its text.
    """
    if not several():
        return compute()
    error, sent = None, np.zeros(0, np.uint8)
    if is_first():
        try:
            found = {"found": compute()}
        except (ValueError, OSError) as raised:
            error, found = raised, {"error": str(raised)}
        sent = np.frombuffer(json.dumps(found).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(sent))))
    sent = multihost_utils.broadcast_one_to_all(sent if is_first() else np.zeros(size, np.uint8))
    found = json.loads(np.asarray(sent, np.uint8).tobytes())
    if "error" in found:
        raise error or FirstProcessError(found["error"])
    return found["found"]


def of_all(x: np.ndarray) -> np.ndarray:
    """Arrays of one shape (of numbers below 2³¹), one from each process, stacked in their order."""
    return np.asarray(multihost_utils.process_allgather(x)) if several() else x[None]


def of_each(found: Any) -> list:
    """What JSON holds, one from each process, in their order."""
    if not several():
        return [found]
    own = np.frombuffer(json.dumps(found).encode(), np.uint8)
    sizes = of_all(np.array(len(own), np.int32))
    rows = of_all(np.pad(own, (0, int(sizes.max()) - len(own)))).astype(np.uint8)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def check_same(settings: Mapping[str, Any]) -> None:
    """Raises ValueError, in all processes, where one was given other settings than the first.

    Each process clips the gradients of its own records and states the guarantee of all.

    Args:
      settings: By name, what JSON holds.
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
