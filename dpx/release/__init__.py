"""Releases from data that no single machine holds.

Every one-shot release of dpx is a sum over records, plus noise. The function that makes the release takes
the records themselves, or `Blocks` of records, which workers read and sum, or a `Partial`, which is a sum
that was made elsewhere:

    popularity.fit(key, histories, epsilon=1.0, delta=1e-6)

    read = functools.partial(release.read_histories, num_items=50_000)
    blocks = release.Blocks(sorted(folder.glob("*.parquet")), read=read, workers=8)
    popularity.fit(key, blocks, epsilon=1.0, delta=1e-6)

    here = popularity.statistic(histories).as_block("here")
    popularity.fit(key, release.merge(here, there), epsilon=1.0, delta=1e-6)

All three are the same release to the last bit, for any number of workers and blocks, whatever order they
finish in, because the sums are of integers (`dpx.release.sums`). Only the process that has the key adds
noise, once. If a worker dies, only time is lost: the blocks that it had not handed in are summed again. A
block that is missing or counts twice ends in an error before anything is released.

Nothing here can check that each record lies in only one block. A copy of a file under another name counts
as another block.

`dpx.save` and `dpx.load` keep releases in files (`dpx.release.saving`).
"""

from dpx.release.blocks import Blocks, are_summed, total
from dpx.release.files import read_arrays, read_histories
from dpx.release.sums import Partial, merge

__all__ = ["Blocks", "Partial", "are_summed", "merge", "read_arrays", "read_histories", "total"]
