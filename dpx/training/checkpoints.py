"""Checkpoints of private training runs, and the models that they end with."""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dpx import _processes
from dpx import _storage as storage
from dpx.training.layout import whole


class Checkpoints:
    """Orbax checkpoints of a private run, without the noise key, each with a digest of its arrays.

    Several processes share the folder, and each writes the parts of the arrays that it holds. A run keeps its
    keys until it has finished: where its checkpoints are lost, it repeats the same steps with the same noise.
    A training that has `finished` has no keys, and its last checkpoint is its only result.
    """

    def __init__(self, folder: Path, finished: bool = False):
        self._folder = folder
        self._remedy = "delete it, and the run starts again with the same noise"
        if finished:
            self._remedy = (
                "this training has finished, and its key is gone: restore the folder from a copy, or use a "
                "new workdir"
            )
        with self._naming("be opened", self._remedy):
            self._manager = ocp.CheckpointManager(
                folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1)
            )

    def save(self, step: int, state) -> None:
        """Saves the parameters and the optimizer's state after a step, in the background."""
        kept = without_key(state)
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(kept), digest=ocp.args.JsonSave(_digest(kept))
        )
        with self._naming("be written", "make room, and repeat the command"):
            self._manager.save(step, args=arguments)

    def restore(self, state) -> tuple[int, Any]:
        """The last step that was saved and the state after it; 0 and the given state if there is none.

        Raises:
          storage.StorageError: if the checkpoint is damaged.
        """
        step = self._manager.latest_step()
        if step is None:
            return 0, state
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, without_key(state))
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(template), digest=ocp.args.JsonRestore()
        )
        with self._naming("be read", self._remedy):
            saved = self._manager.restore(step, args=arguments)
            if saved["digest"] != _digest(saved["state"]):
                raise ValueError("its arrays are not those that were written")
        params, (noise, *rest) = saved["state"]
        return step, (params, (state[1][0]._replace(count=noise), *rest))

    def close(self) -> None:
        """Waits for what is written in the background, and raises its errors."""
        with self._naming("be written", "make room, and repeat the command"):
            self._manager.close()

    @contextlib.contextmanager
    def _naming(self, what: str, remedy: str):
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many types
            raise storage.StorageError(
                f"{self._folder} cannot {what} ({type(error).__name__}): {remedy}"
            ) from error


def without_key(state):
    """The pair (parameters, optimizer's state), with the count of the noise in place of its key and count."""
    params, (noise, *rest) = state
    return params, (noise.count, *rest)


def _digest(state) -> dict[str, str]:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digest.update(np.ascontiguousarray(whole(leaf)).reshape(-1).view(np.uint8).data)
    return {"sha256": digest.hexdigest()}


def save_model(workdir: Path, model: Any) -> None:
    """Saves the arrays of a private model, which each process has whole, in a run's folder."""
    if _processes.several():  # Orbax then refuses arrays that lie on one device
        model = jax.tree.map(np.asarray, model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(workdir.absolute() / "model", model, force=True)


def copy_model(source: Path, target: Path) -> None:
    """Saves the model of one run's folder anew in another one: Orbax notes when a model was saved first."""
    save_model(target, load_model(source, None))


def load_model(workdir: Path, template: Any) -> Any:
    """The model that `save_model` saved, in the shapes and the structure of `template`, if that is given."""
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
    folder = workdir.absolute() / "model"
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(folder, shapes)
    except Exception as error:  # Orbax and TensorStore raise many types
        raise storage.damaged(folder) from error
