"""Releases from data that no machine holds: sums over blocks on many workers, and one release of the total.

    from dpx import distributed
    from dpx.recommend import popularity

    read = functools.partial(distributed.read_histories, num_items=50_000)
    spec = popularity.passes(key, epsilon=1.0, delta=1e-6)
    made = distributed.release(sorted(folder.glob("*.parquet")), spec, read=read, workers=8)

Workers sum blocks (`dpx.partial`), and only this process, which has the key, adds noise, once. Sums are of
integers, so that the release is the same to the last bit for any number of workers and blocks, and in
whatever order they finish. A worker that dies costs time only: what it had not handed in is done again. A
block that counts twice or is missing ends in an error before anything is released.

What nobody here can check is that each record lies in one block: see `dpx.partial`. Neither is a copy of a
file under another name seen to be the same.
"""

from dpx.distributed.executors import Here, Processes, Ray
from dpx.distributed.releases import release
from dpx.distributed.sources import read_arrays, read_histories

__all__ = ["Here", "Processes", "Ray", "read_arrays", "read_histories", "release"]
