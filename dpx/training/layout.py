"""Where the records, the parameters and the noise of a training run live: on one device, or on a mesh.

Records are numbered 0, 1, ..., and each device along the axis `data` holds a block of them. A sample is drawn
by record number, so that it is the same one on any mesh; each device takes those of its members that it
holds, and their clipped gradients are added up once. Along the axis `model` devices share every large array
of the parameters and of the optimizer's state, and make the noise of the entries that they hold.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dpx import _validate

AXES = ("data", "model")


def as_mesh(mesh: Mesh | Mapping[str, int] | None) -> Mesh | None:
    """A mesh with the axes `data` and `model`, laid out by the compiler, or None for one device.

    Args:
      mesh: A mesh with one or both of the axes, or their sizes: {"data": 4, "model": 2} takes the first
        eight devices.

    Raises:
      ValueError: for other axes, or more devices than there are.
    """
    if mesh is None:
        return None
    sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else mesh
    if not isinstance(sizes, Mapping) or not sizes or not set(sizes) <= set(AXES):
        raise ValueError(
            f"mesh={mesh!r} must have the axes 'data' and 'model', or one of them: pass a jax.sharding.Mesh "
            "with these names, or their sizes, such as {'data': 4, 'model': 2}"
        )
    shape = [_validate.check_integer(sizes.get(axis, 1), f"mesh[{axis!r}]") for axis in AXES]
    if isinstance(mesh, Mesh):
        order = [mesh.axis_names.index(axis) for axis in AXES if axis in sizes]
        return Mesh(mesh.devices.transpose(order).reshape(shape), AXES)
    found = jax.devices()
    if math.prod(shape) > len(found):
        raise ValueError(
            f"mesh={dict(sizes)} must have at most {len(found)} devices, as many as there are: use smaller "
            "axes, or more devices (on a CPU XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight)"
        )
    return Mesh(np.array(found[: math.prod(shape)]).reshape(shape), AXES)


class Layout:
    """Which device holds which records and which part of an array.

    Attributes:
      mesh: With the axes `data` and `model`; None for one device.
      rows: The number of records.
      shards: The number of blocks of records.
    """

    def __init__(self, mesh: Mesh | None, rows: int):
        self.mesh, self.rows = mesh, rows
        self.shards = 1 if mesh is None else mesh.shape["data"]
        self._bounds = np.arange(self.shards + 1) * rows // self.shards
        # Devices hold blocks of one size, filled up with rows that no sample has.
        self.block = max(1, int(np.diff(self._bounds).max()))

    def records(self, tree: Any) -> Any:
        """Arrays with a row for each record, spread over `data`."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        spread = NamedSharding(self.mesh, P("data"))

        def put(x: Any) -> jax.Array:
            x = np.asarray(x)
            x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)

            def block(index: Any) -> np.ndarray:
                shard = (index[0].start or 0) // self.block
                rows = x[self._bounds[shard] : self._bounds[shard + 1]]
                return np.pad(rows, [(0, self.block - len(rows)), *[(0, 0)] * (x.ndim - 1)])

            shape = (self.shards * self.block, *x.shape[1:])
            return jax.make_array_from_callback(shape, spread, block)

        return jax.tree.map(put, tree)

    def batch(
        self, chosen: np.ndarray, piece: int, room: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Where a sample lies: for each block in turn, the same number of places in it.

        Args:
          chosen: The numbers of the records, in ascending order.
          piece: How many of a block are taken at a time.
          room: How many places there are for each block at least, so that `jit` sees few shapes.

        Returns:
          Places in the block and a mask, each (shards · places,), and how many pieces are not empty.
        """
        ends = np.searchsorted(chosen, self._bounds)
        counts = np.diff(ends)
        pieces = max(1, math.ceil(counts.max() / piece))
        width = max(pieces, math.ceil(room / piece)) * piece
        places = np.zeros((self.shards, width), np.int32)
        for shard, count in enumerate(counts):
            own = chosen[ends[shard] : ends[shard + 1]]
            places[shard, :count] = own - self._bounds[shard]
        mask = np.arange(width) < counts[:, None]
        return places.reshape(-1), mask.reshape(-1), pieces

    def put(self, tree: Any) -> Any:
        """Parameters or an optimizer's state, where they live."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: jax.device_put(x, self.sharding(x)), tree)

    def sharding(self, x: Any) -> NamedSharding | None:
        """Along `model`, of the largest axis that it divides; where there is none, all hold all."""
        if self.mesh is None:
            return None
        devices, spec = self.mesh.shape["model"], [None] * x.ndim
        whole = [axis for axis, size in enumerate(x.shape) if size and size % devices == 0]
        if devices > 1 and whole:
            spec[max(whole, key=lambda axis: x.shape[axis])] = "model"
        return NamedSharding(self.mesh, P(*spec))

    def constrain(self, tree: Any) -> Any:
        """The same values inside `jit`, each where `put` would have it."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, self.sharding(x)), tree)

    def sum_over_blocks(self, sums: Any) -> Any:
        """`sums(kept, held)`, added up over the blocks of records; the arrays of `held` are spread over them.

        Each device runs it on its own block, as if it were alone, so that no record reaches another device
        before it is clipped.
        """
        if self.shards == 1:
            return sums

        def by_block(kept: Any, held: Any) -> Any:
            return jax.lax.psum(sums(kept, held), "data")

        # Unchecked, because losses need not name what differs between devices.
        return jax.shard_map(
            by_block,
            mesh=self.mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            axis_names={"data"},
            check_vma=False,
        )
