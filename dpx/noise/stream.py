"""Random words from a cryptographic generator: the keystream of ChaCha20, by the library `cryptography`.

ChaCha20 (RFC 8439) makes a stream of words of a secret of 256 bits and a nonce of 96. No way is known to tell
these words from fair bits without the secret, however many are seen. JAX's generator, threefry, has keys of
64 bits, and neither it nor NumPy's PCG64 was made to withstand an adversary.

`dpx.training.fit(secure=True)` takes the samples and the noise of a training from two such streams. The law
of the noise and its proof (`dpx.noise.lattice`) stay what they are: they ask for fair bits and nothing else.
Words are made on the host. A step is given them in place of a key (`dpx.noise.leaves.Bits`).
"""

import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpx.noise import lattice
from dpx.noise.leaves import FURTHER, Bits, Shapes, word_shapes

ASSUMPTION = (
    "nobody tells the keystream of ChaCha20, of which the training's samples and noise are drawn, from fair "
    "bits without its secret of 256 bits"
)
SECRET_BYTES = 32
_CHUNK = 2**18  # bytes that are made at a time: they stay in the processor's cache
_ZEROS = memoryview(bytes(_CHUNK))
_LEAST_NOISE = 1 / 18  # noise multiplier at which 10 of the tail's 28 standard deviations are left
_MOST = 2**36  # words of a place, after which the cipher's counter of 32 bits would begin again


class Stream:
    """A source of random words, which has words of its own for each place.

    A place is up to three whole numbers in [0, 2³²). Its words follow from it and from the secret alone. Draw
    one thing at each place.
    """

    def __init__(self, secret: bytes):
        """A stream that follows from a secret of 32 bytes.

        Raises:
          ModuleNotFoundError: without the library `cryptography`.
          ValueError: for a secret of another length.
        """
        check()
        self.secret = check_secret(secret)

    def shown(self, count: int) -> tuple[int, ...]:
        """Words by which a replay recognises the stream; they tell nothing of what it draws."""
        named = hashlib.blake2b(b"shown", key=self.secret, digest_size=4 * count).digest()
        return struct.unpack(f"<{count}I", named)

    def words(self, count: int, *place: int) -> np.ndarray:
        """(count,) uint32: the first words of the keystream whose nonce is the place."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        if count > _MOST:
            raise ValueError(f"count={count} must be at most {_MOST}: draw at several places")
        nonce = struct.pack("<4I", 0, *place, *(0,) * (3 - len(place)))
        cipher = Cipher(algorithms.ChaCha20(self.secret, nonce), mode=None).encryptor()
        words = np.empty(count, "<u4")
        left: Any = words.view(np.uint8)
        for start in range(0, len(left), _CHUNK):
            part: Any = left[start : start + _CHUNK]
            cipher.update_into(_ZEROS[: len(part)], part)
        return words

    def at(self, *place: int) -> "Place":
        """A generator for one draw at a place, with methods of NumPy's."""
        return Place(self, place)

    def bits(
        self, step: int, shapes: Shapes, put: Callable[[np.ndarray], Any] = jnp.asarray
    ) -> Bits:
        """The words of a step's noise, for arrays of these shapes: 8.5 bytes for each of their entries.

        They are made for one group of arrays after another, and `put` takes them to where noise is added.
        """
        words, further = [], []
        for group, (own, columns) in enumerate(word_shapes(shapes)):
            entries = math.prod(own)
            cuts = np.cumsum([entries, entries, columns, columns])
            made = self.words(int(cuts[-1]) + FURTHER, step, group)
            size, rounding, *shared, rest = np.split(made, cuts)
            parts = size.reshape(own), rounding.reshape(own), *shared
            words.append(lattice.Words(*map(put, parts)))
            further.append(put(rest))
        return Bits(tuple(words), tuple(further))


class Place(NamedTuple):
    """A place of a stream, with the two methods of a NumPy generator that draw samples."""

    stream: Stream
    place: tuple[int, ...]

    def random(self, size: int) -> np.ndarray:
        """(size,) uniform numbers on the multiples of 2⁻⁵³ in [0, 1)."""
        return (self._wide(size) >> np.uint64(11)) * 2.0**-53

    def integers(self, high: int, *, size: int) -> np.ndarray:
        """(size,) whole numbers in [0, high), equally likely within a share of high·2⁻⁶⁴."""
        return (self._wide(size) % np.uint64(high)).astype(np.int64)

    def _wide(self, size: int) -> np.ndarray:
        return self.stream.words(2 * size, *self.place).view("<u8")


def check_secret(secret: bytes) -> bytes:
    """Returns the secret; raises ValueError for another length than 32 bytes."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(
            f"secret has {len(secret)} bytes, which must be {SECRET_BYTES}: use os.urandom({SECRET_BYTES})"
        )
    return bytes(secret)


def check_noise(noise_multiplier: Any) -> None:
    """Raises ValueError for noise so small that the end of its tail tells neighbours apart; 0 is no noise."""
    traced = isinstance(noise_multiplier, Tracer)
    known = np.asarray(np.nan if traced else noise_multiplier, np.float64)
    if not ((known == 0) | (known >= _LEAST_NOISE)).all():
        raise ValueError(
            f"noise_multiplier={noise_multiplier} must be a number of at least 1/18 with secure=True, where "
            "the tail of the noise ends at 28 standard deviations: use a smaller epsilon, or secure=False"
        )


def check() -> None:
    """Raises ModuleNotFoundError without the library `cryptography`."""
    try:
        import cryptography.hazmat.primitives.ciphers  # noqa: F401
    except ImportError:
        raise ModuleNotFoundError(
            'secure=True needs cryptography: in the clone of dpx, pip install -e ".[secure]"',
            name="cryptography",
        ) from None
