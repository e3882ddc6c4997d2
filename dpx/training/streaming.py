"""The random words of a secure training's noise, which a thread makes one step ahead."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import jax

from dpx.noise.leaves import Bits, Shapes
from dpx.noise.stream import Stream
from dpx.training.layout import Layout


def bits_of_steps(
    noise: jax.Array | Stream, shapes: Shapes, layout: Layout, steps: range
) -> Generator[Bits]:
    """Yields the words of each step's noise; nothing where a key draws the noise.

    The words of an entry's noise lie on the device that holds the entry. While a step computes, the words of
    the next one are made: both together take 17 bytes for each entry. The host holds the words of one array
    at a time, beside those on their way to the devices. Each process makes all words, and keeps those of its
    own devices.

    Args:
      noise: The key or the stream of the training's noise.
      shapes: The shapes of the arrays that a step releases.
      layout: The layout of these arrays.
      steps: The steps that are still to be taken.
    """
    if not isinstance(noise, Stream):
        return

    def made(step: int) -> Bits:
        return noise.bits(step, shapes, layout.place)

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(made, steps.start)
        for step in steps:
            bits, after = coming.result(), step + 1
            if after in steps:
                coming = thread.submit(made, after)
            yield bits
