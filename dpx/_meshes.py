"""What JAX's types say about the mesh that an array lives on."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType


def varying(*trees: Any) -> frozenset[str]:
    """The axes of `jax.shard_map` along which anything in these trees differs between devices.

    Nothing is known under `jax.pmap`, or where `shard_map` was told not to check (`check_vma=False`).
    """
    return frozenset().union(*map(_varying, jax.tree.leaves(trees)))


def _varying(x: Any) -> frozenset[str]:
    # A shape from `jax.eval_shape` has the attribute itself.
    kind = getattr(x, "manual_axis_type", None) or getattr(jax.typeof(x), "manual_axis_type", None)
    return kind.varying if kind else frozenset()


def mesh_of(tree: Any) -> AbstractMesh:
    """The mesh at hand, or else that of an array with explicit axes, which is part of its type."""
    mesh = jax.sharding.get_abstract_mesh()
    found = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return mesh if not mesh.empty else next((m for m in found if not m.empty), mesh)


def explicit_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """The axes of a mesh whose sharding is a part of every array's type."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)
