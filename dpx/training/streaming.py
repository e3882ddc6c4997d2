"""The random words of a secure training's noise, which a thread makes while the step before computes."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import jax

from dpx.noise.leaves import Bits, Shapes
from dpx.noise.stream import Stream
from dpx.training.layout import Layout


def bits_of_steps(
    noise: jax.Array | Stream, shapes: Shapes, layout: Layout, steps: range
) -> Generator[Bits]:
    """Yields for each step the words of its noise; nothing where a key draws it.

    They lie where the entries lie whose noise they make. While a step computes, its words are there, and
    those of the next one are being made: 17 bytes together for each entry. The host holds, beside what is on
    its way to the devices, those of one array at a time. Each process makes all words, and keeps those of its
    devices.

    Args:
      noise: Of the training.
      shapes: Of the arrays that a step releases.
      layout: Where they live.
      steps: That are still to be taken.
    """
    if not isinstance(noise, Stream):
        return

    def made(step: int) -> Bits:
        return noise.bits(step, shapes, layout.place)

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(made, steps.start)
        for step in steps:
            found, after = coming.result(), step + 1
            if after in steps:
                coming = thread.submit(made, after)
            yield found
