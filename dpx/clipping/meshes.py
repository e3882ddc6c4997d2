"""Runs a computation so that its sums are the same on every mesh.

On automatic axes the compiler lays arrays out, and this module has nothing to do. Inside `jax.shard_map`
every device sums the examples of its own shard, so parameters must count as values that differ between
devices: differentiation would otherwise add up the gradients of *different examples*, one from each device,
before they are clipped. Axes with explicit sharding types are handed to `jax.shard_map` where they shard the
batch, which leaves one reduction of the sums, and to the compiler where they shard parameters.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dpx._meshes import explicit_axes, mesh_of, varying


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """The same values, declared to differ along these axes too."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def on_one_cpu() -> bool:
    """Whether there is one device, and it is a CPU."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def zeros(like: Any) -> Any:
    """Zeros of the same shapes and types, which vary over the same axes of a mesh."""
    once = functools.cache(lambda shape, dtype, axes: vary(jnp.zeros(shape, dtype), axes))
    return jax.tree.map(lambda s: once(s.shape, s.dtype, varying(s)), like)


def on_mesh(constants: Sequence[Any]) -> dict[int, jax.Array]:
    """The constants whose layout on a mesh is a part of their type, by their number."""
    return {
        i: leaf
        for i, leaf in enumerate(constants)
        if isinstance(leaf, jax.Array) and not jax.typeof(leaf).sharding.mesh.empty
    }


def one_example(batch: Any) -> Any:
    """The shapes and types of one example, of arrays or of shapes and types of a batch."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        if not varying(x):
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        kind = jax.typeof(x)
        sharding = NamedSharding(kind.sharding.mesh, P(*kind.sharding.spec[1:]))
        layout = {"sharding": sharding, "manual_axis_type": kind.manual_axis_type}
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, **layout)

    return jax.tree.map(shape, batch)


def run(body: Callable, loss: Callable, leaves: list, frozen: Any, batch: tuple, mask: jax.Array):
    """Runs `body` on whatever mesh its arguments live on: sums, norms, and what else is of each example.

    `frozen` are arrays of the parameters that are not differentiated, which a function on explicit axes must
    not close over. `loss` is a function of (leaves, one example, frozen).
    """
    given = leaves, frozen, batch, mask

    def on_device(leaves: list, frozen: Any, batch: tuple, mask: jax.Array) -> tuple:
        """`body` on the examples of one device inside `shard_map`, on all of them elsewhere."""
        axes = varying(leaves, batch, mask)
        if jax.sharding.get_abstract_mesh().manual_axes:
            # What the loss closes over may differ between devices as well.
            axes |= varying(jax.eval_shape(loss, leaves, one_example(batch), frozen))
        leaves, batch, mask = vary((leaves, batch, mask), axes)
        return body(leaves, frozen, batch, mask)

    mesh = mesh_of(given)
    if not (explicit := explicit_axes(mesh)):
        return on_device(*given)
    # The explicit axes that the examples are spread over.
    specs = (jax.typeof(x).sharding.spec[0] for x in jax.tree.leaves((batch, mask)))
    axes = next((axes for axes in specs if axes is not None), ())
    shards = axes if isinstance(axes, tuple) else (axes,)

    def by_shard(*arguments: Any):
        sums, *of_examples = on_device(*arguments)
        return jax.lax.psum(sums, shards), *of_examples

    def automatic(*arguments: Any):
        if not shards:
            return on_device(*arguments)
        specs = P(), P(shards), P(shards)
        # Unchecked, because models that run on explicit axes need not name what differs between devices.
        settings = {"axis_names": set(shards), "check_vma": False}
        run = jax.shard_map(by_shard, in_specs=(P(), *specs), out_specs=specs, **settings)
        return run(*arguments)

    layouts = [jax.typeof(leaf).sharding.spec for leaf in leaves], P(shards), P(shards)
    with jax.sharding.use_abstract_mesh(mesh):
        laid_out: Any = jax.sharding.auto_axes(automatic, axes=explicit, out_sharding=layouts)
        return laid_out(*given)
