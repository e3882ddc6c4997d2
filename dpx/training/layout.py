"""Where the records, the parameters and the noise of a training run live: on one device, or on a mesh.

Records are numbered 0, 1, ..., through all processes, and each device along the axis `data` holds a block of
those of its process. A sample is drawn by record number, so that it is the same one on any mesh; each device
takes those of its members that it holds, and their clipped gradients are added up once. Along the axis
`model` devices share every large array of the parameters and of the optimizer's state, and make the noise of
the entries that they hold.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dpx import _processes, _validate

AXES = ("data", "model")


def as_mesh(mesh: Mesh | Mapping[str, int] | None) -> Mesh | None:
    """A mesh with the axes `data` and `model`, on which the compiler lays out arrays; None for one device.

    Args:
      mesh: A mesh with one or both of the axes, or their sizes: {"data": 4, "model": 2} takes the first
        eight devices. Several processes use all their devices, and `data` is what `model` leaves of them.

    Raises:
      ValueError: for other axes, more devices than there are, or fewer than several processes have.
    """
    several = _processes.several()
    if mesh is None and not several:
        return None
    sizes = {"model": 1} if mesh is None else dict(mesh.shape) if isinstance(mesh, Mesh) else mesh
    if not isinstance(sizes, Mapping) or not sizes or not set(sizes) <= set(AXES):
        raise ValueError(
            f"mesh={mesh!r} must have the axes 'data' and 'model', or one of them: pass a jax.sharding.Mesh "
            "with these names, or their sizes, such as {'data': 4, 'model': 2}"
        )
    model = _validate.check_integer(sizes.get("model", 1), "mesh['model']")
    left = max(1, jax.device_count() // model) if several else 1
    shape = [_validate.check_integer(sizes.get("data", left), "mesh['data']"), model]
    if isinstance(mesh, Mesh):
        devices = mesh.devices.transpose([mesh.axis_names.index(x) for x in AXES if x in sizes])
    else:
        devices = np.array(jax.devices()[: math.prod(shape)])
    if math.prod(shape) > devices.size:
        raise ValueError(
            f"mesh={dict(sizes)} must have at most {devices.size} devices, as many as there are: use smaller "
            "axes, or more devices (on a CPU XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight)"
        )
    laid_out = Mesh(devices.reshape(shape), AXES)
    if several:
        _check_processes(laid_out)
    return laid_out


def _check_processes(mesh: Mesh) -> None:
    """Raises ValueError where a process would take no part, or two would hold the same records."""
    if mesh.size != jax.device_count():
        raise ValueError(
            f"mesh={dict(mesh.shape)} must use all {jax.device_count()} devices of the processes: make the "
            "axis 'data' larger"
        )
    if any(len({device.process_index for device in row}) > 1 for row in mesh.devices):
        raise ValueError(
            f"mesh={dict(mesh.shape)} must have the devices along 'model' in one process: make that axis "
            f"divide {jax.local_device_count()}, the number of devices of each"
        )


def share(tree: Any) -> Any:
    """The rows that this process trains on, of arrays that every process has whole."""
    if not _processes.several():
        return tree
    number, count = jax.process_index(), jax.process_count()
    return jax.tree.map(
        lambda x: x[number * len(x) // count : (number + 1) * len(x) // count], tree
    )


def whole(x: Any) -> np.ndarray:
    """A copy on the host of an array that is spread over devices, those of other processes too."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = jax.device_put(x, NamedSharding(x.sharding.mesh, P()))  # pyright: ignore
    return np.asarray(x)


class Layout:
    """Which device holds which records and which part of an array.

    Attributes:
      mesh: With the axes `data` and `model`; None for one device.
      rows: The number of records, of all processes together.
      shards: The number of blocks of records.
    """

    def __init__(self, mesh: Mesh | Mapping[str, int] | None, rows: int):
        """The layout of this process's records, `rows` of them, on a mesh that `as_mesh` takes."""
        mesh = as_mesh(mesh)
        counts = _processes.of_all(np.array(rows, np.int32)).astype(np.int64)
        ends = np.cumsum([0, *counts])
        owners = [0] if mesh is None else [row[0].process_index for row in mesh.devices]
        self.mesh, self.rows, self.shards = mesh, int(ends[-1]), len(owners)
        # The first record of this process, and the first of each block and the one after its last.
        self._offset, self._own = ends[jax.process_index()] if len(counts) > 1 else 0, rows
        self._first, self._last = np.zeros((2, self.shards), int)
        for owner in set(owners):
            own = np.flatnonzero(np.equal(owners, owner))
            cuts = ends[owner] + np.arange(len(own) + 1) * counts[owner] // len(own)
            self._first[own], self._last[own] = cuts[:-1], cuts[1:]
        # Devices hold blocks of one size, filled up with rows that no sample has.
        self.block = max(1, int((self._last - self._first).max()))

    @np.errstate(over="ignore")  # A warning of numbers beyond 32 bits would tell of a record.
    def records(self, tree: Any, begins: np.ndarray | None = None) -> Any:
        """Spreads arrays over `data` that have a row for each record of this process.

        Args:
          tree: The arrays.
          begins: (records + 1,) where the rows of each record begin, if these records are users with several
            rows each; None for one row each.
        """
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        spread = NamedSharding(self.mesh, P("data"))
        first, last, size = self._first - self._offset, self._last - self._offset, self.block
        if begins is not None:
            # Blocks of other processes lie before or after all that is here, and look empty.
            first, last = (begins[np.clip(x, 0, self._own)] for x in (first, last))
            largest = np.array((last - first).max(), np.int32)
            size = max(1, int(_processes.of_all(largest).max()))

        def put(x: Any) -> jax.Array:
            x = np.asarray(x)
            x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)

            def block(index: Any) -> np.ndarray:
                shard = (index[0].start or 0) // size
                rows = x[first[shard] : last[shard]]
                return np.pad(rows, [(0, size - len(rows)), *[(0, 0)] * (x.ndim - 1)])

            shape = (self.shards * size, *x.shape[1:])
            return jax.make_array_from_callback(shape, spread, block)

        return jax.tree.map(put, tree)

    def own(self, numbers: np.ndarray) -> np.ndarray:
        """The rows of this process's records, from an array with a row for every record."""
        return numbers[self._offset :][: self._own]

    def batch(
        self, chosen: np.ndarray, piece: int, room: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """The places of a sample's records: the same number of places for each block, block after block.

        Args:
          chosen: The numbers of the records, in ascending order.
          piece: The number of a block's records that are taken at a time.
          room: The least number of places for each block, which keeps the shapes few that `jit` sees.

        Returns:
          Places in the block and a mask, each (shards · places,), and how many pieces are not empty.
        """
        begin, end = np.searchsorted(chosen, self._first), np.searchsorted(chosen, self._last)
        counts = end - begin
        pieces = max(1, math.ceil(counts.max() / piece))
        width = max(pieces, math.ceil(room / piece)) * piece
        places = np.zeros((self.shards, width), np.int32)
        for shard, count in enumerate(counts):
            places[shard, :count] = chosen[begin[shard] : end[shard]] - self._first[shard]
        mask = np.arange(width) < counts[:, None]
        return places.reshape(-1), mask.reshape(-1), pieces

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """The numbers of the records at the places of a `batch`; an empty place has any number."""
        first = np.repeat(self._first, len(places) // self.shards)
        return np.minimum(first + places, self.rows - 1)

    def place(self, x: np.ndarray) -> jax.Array:
        """Puts an array that every process has whole where `put` would; no process waits for another."""
        sharding = self.sharding(x)
        if sharding is None:
            return jnp.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def put(self, tree: Any) -> Any:
        """Puts parameters or an optimizer's state where they live."""
        if self.mesh is None:
            return tree
        return jax.tree.map(self._put, tree)

    def _put(self, x: Any) -> jax.Array:
        if _processes.several() and isinstance(x, jax.Array) and x.is_fully_addressable:
            # JAX spreads over processes what is on the host, after making sure that all have the same.
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                words = np.asarray(jax.random.key_data(x))
                words = jax.device_put(words, NamedSharding(self.mesh, P()))  # pyright: ignore
                return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
            x = np.asarray(x)
        return jax.device_put(x, self.sharding(x))

    def sharding(self, x: Any) -> NamedSharding | None:
        """How an array is shared along `model`: by its largest axis that `model` divides, else not at all."""
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
        """A function of (kept, held) that adds up `sums(kept, held)` over the blocks of records.

        `held` is spread over the blocks. Each device runs `sums` on its own block, as if it were alone, so
        that no record reaches another device before it is clipped.
        """
        if self.shards == 1:
            return sums

        def added_up(kept: Any, held: Any) -> Any:
            return jax.lax.psum(sums(kept, held), "data")

        return self.by_block(added_up, P())

    def by_block(self, function: Any, out: P = P("data")) -> Any:  # noqa: B008
        """A function that runs `function(kept, held)` on each block; results are spread like `held`."""
        if self.shards == 1:
            return function
        # Unchecked, because losses need not name what differs between devices.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(P(), P("data")),
            out_specs=out,
            axis_names={"data"},
            check_vma=False,
        )
