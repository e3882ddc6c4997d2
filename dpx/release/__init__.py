"""Releases from data that no machine holds.

Every one-shot release of dpx is a sum over records with noise. The function that makes it takes the records,
or `Blocks` of them, which workers read and sum, or a `Partial`, a sum that was made elsewhere:

    popularity.fit(key, histories, epsilon=1.0, delta=1e-6)

    read = functools.partial(release.read_histories, num_items=50_000)
    blocks = release.Blocks(sorted(folder.glob("*.parquet")), read=read, workers=8)
    popularity.fit(key, blocks, epsilon=1.0, delta=1e-6)

    here = popularity.statistic(histories).as_block("here")
    popularity.fit(key, release.merge(here, there), epsilon=1.0, delta=1e-6)

All three are the same release to the last bit, for any number of workers and blocks, and in whatever order
they finish, because sums are of integers (`dpx.release.sums`). Only the process that has the key adds noise,
once. A worker that dies costs time only: what it had not handed in is done again. A block that counts twice
or is missing ends in an error before anything is released.

What nobody here can check is that each record lies in one block. Neither is a copy of a file under another
name seen to be the same.

`dpx.save` and `dpx.load` keep releases in files (`dpx.release.saving`).
"""

from dpx.release.blocks import Blocks, are_summed, total
from dpx.release.files import read_arrays, read_histories
from dpx.release.sums import Partial, merge

__all__ = ["Blocks", "Partial", "are_summed", "merge", "read_arrays", "read_histories", "total"]
