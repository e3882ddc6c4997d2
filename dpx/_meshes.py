"""The mesh of an array, and how the array is spread over it, as JAX's types state them."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType


def varying(*trees: Any) -> frozenset[str]:
    """The axes of `jax.shard_map` along which some array of these trees differs between devices.

    The result is empty under `jax.pmap` and under `shard_map(check_vma=False)`, where types do not tell.
    """
    return frozenset().union(*map(_varying, jax.tree.leaves(trees)))


def _varying(x: Any) -> frozenset[str]:
    # A shape from `jax.eval_shape` has the attribute itself.
    kind = getattr(x, "manual_axis_type", None) or getattr(jax.typeof(x), "manual_axis_type", None)
    return kind.varying if kind else frozenset()


def mesh_of(tree: Any) -> AbstractMesh:
    """The mesh that is set in JAX, or else the mesh in the type of the first array that has one."""
    mesh = jax.sharding.get_abstract_mesh()
    of_arrays = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return mesh if not mesh.empty else next((m for m in of_arrays if not m.empty), mesh)


def explicit_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """The mesh's axes of type `Explicit`: how an array is sharded along them is part of its type."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)
