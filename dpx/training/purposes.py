"""A key for each purpose: randomness follows from a secret and the name of what it is for."""

import hashlib
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from dpx._validate import warn_of_guess, wrong_key
from dpx.noise import stream
from dpx.noise.stream import SECRET_BYTES, Stream


class TrainingKeys(NamedTuple):
    """The randomness of one training, all of which is secret.

    Attributes:
      noise: The noise of step t is drawn from fold_in(noise, t), or from the words of a stream.
      dropout: The masks of step t follow from fold_in(dropout, t) and the index of the record. Without a
        stream, so does which records of a user are drawn.
      sampling: The samples follow from it, and if it is a stream, also which records of a user are drawn.
    """

    noise: jax.Array | Stream
    dropout: jax.Array
    sampling: np.random.SeedSequence | Stream


class Keys:
    """The secrets of a run, from which a key for each purpose follows by the purpose's name.

    A key is a keyed hash (BLAKE2b) of the name, of as many bits as keys have. So it depends neither on the
    order of the releases nor on how many there are, and two names share one with probability 2⁻⁶⁴. A name
    serves once, because noise that two releases share cancels. A run that resumes has the same secrets in
    another `Keys`, and so the same key under every name.
    """

    def __init__(self, key: jax.Array, seed: np.random.SeedSequence, secret: bytes | None = None):
        """The keys that follow from three secrets.

        Args:
          key: The secret of noise and dropout.
          seed: The secret of samples.
          secret: The secret of secure trainings, 32 bytes; None where there are none.
        """
        self._of_noise = words_of(key).tobytes()
        self._of_samples = seed.generate_state(8).tobytes()
        self._of_streams = None if secret is None else stream.check_secret(secret)
        self._given: dict[tuple[str, str], Any] = {}

    def noise(self, release: str) -> jax.Array:
        """The key of the noise of the release with this name.

        Raises:
          ValueError: if it has been given out.
        """
        self._give("release", release)
        return self._key("release", release)

    def seed(self, draw: str) -> np.random.SeedSequence:
        """The seed of the draw with this name, which NumPy makes.

        Raises:
          ValueError: if it has been given out.
        """
        self._give("draw", draw)
        return self._seed("draw", draw)

    def training(self, label: str, begun: Any = None, *, secure: bool = False) -> TrainingKeys:
        """The keys of the training with this label.

        Args:
          label: The label of the training.
          begun: What the training begins with. A second call is given the same keys if its `begun` is equal,
            and is refused if it is another one or None.
          secure: Whether noise and samples are drawn from cryptographic streams (`dpx.noise.stream`).

        Raises:
          ValueError: if they have been given out to another training.
        """
        self._give("label", label, begun)
        noise, sampling = (self._stream, self._stream) if secure else (self._key, self._seed)
        return TrainingKeys(
            noise=noise("noise of training", label),
            dropout=self._key("dropout of training", label),
            sampling=sampling("samples of training", label),
        )

    def shown(self) -> str:
        """A name by which a training's folder knows these secrets; it tells nothing of what they draw."""
        secrets = self._of_noise + self._of_samples + (self._of_streams or b"")
        return hashlib.blake2b(secrets, digest_size=16, person=b"dpx shown").hexdigest()

    def _give(self, kind: str, name: str, begun: Any = None) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{kind}={name!r} must be a name: give a string that is not empty")
        given, repeated = (kind, name) in self._given, self._given.get((kind, name))
        if given and (begun is None or begun != repeated):
            raise ValueError(
                f"{kind}={name!r} must be another one, since its key has been given out and two that share "
                "noise show their difference: give each a name of its own, or repeat a training with the "
                "same data, arguments and workdir"
            )
        self._given[kind, name] = begun

    def _key(self, kind: str, name: str) -> jax.Array:
        words = _hashed(self._of_noise, kind, name, 4 * _key_words())
        return of_words(np.frombuffer(words, np.uint32))

    def _seed(self, kind: str, name: str) -> np.random.SeedSequence:
        return np.random.SeedSequence(
            int.from_bytes(_hashed(self._of_samples, kind, name, 32), "little")
        )

    def _stream(self, kind: str, name: str) -> Stream:
        if self._of_streams is None:
            raise ValueError("keys must have a secret for secure=True: give Keys one of 32 bytes")
        return Stream(_hashed(self._of_streams, kind, name, SECRET_BYTES))


def secret_key() -> jax.Array:
    """A JAX key from the operating system's entropy, which fills every word of it.

    `jax.random.key(seed)` keeps 32 bits of its seed, which can be searched. Whoever knows a key can subtract
    the noise that was drawn with it: keep it out of logs and files.
    """
    return of_words(np.frombuffer(os.urandom(4 * _key_words()), np.uint32))


def derive(key: jax.Array) -> Keys:
    """The keys that follow from one JAX key as the only secret."""
    words = words_of(key)
    return Keys(of_words(words), np.random.SeedSequence(words.tolist()))


def check(key: Any, secure: bool = False) -> None:
    """Raises ValueError for anything but one JAX key or `Keys`, and with `secure` for a JAX key.

    Raises:
      ModuleNotFoundError: with `secure`, without the library that makes streams.
    """
    if secure:
        stream.check()
        if key is not None and not (isinstance(key, Keys) and key._of_streams):
            raise ValueError(
                "key must be None with secure=True: a JAX key has 64 bits, and 256 then come from the "
                "operating system's randomness; or dpx.training.Keys that have a secret"
            )
        return
    if isinstance(key, Keys):
        return
    try:
        shape = words_of(key).shape
    except TypeError:
        shape = None
    if shape == (_key_words(),):
        warn_of_guess(int(words_of(key)[0]) == 0, "key")
        return
    if jax.numpy.issubdtype(getattr(key, "dtype", int), jax.dtypes.prng_key) and not key.ndim:
        raise ValueError(
            f"key of the generator {jax.random.key_impl(key)} must be one of the default generator: set "
            "jax_default_prng_impl to that, or use dpx.secret_key()"
        )
    raise wrong_key(key)


def from_seed(seed: int) -> Keys:
    """The keys of a run whose only secret is this number, at least 0. They are as easy to guess as it is."""
    secret = np.random.SeedSequence(seed)
    streams = hashlib.blake2b(f"seed: {seed}".encode(), digest_size=SECRET_BYTES).digest()
    return Keys(of_words(secret.generate_state(_key_words())), secret, streams)


def _hashed(secret: bytes, kind: str, name: str, size: int) -> bytes:
    """A keyed hash of `size` bytes, which tells nothing of the hash for another kind or name."""
    return hashlib.blake2b(f"{kind}: {name}".encode(), key=secret, digest_size=size).digest()


def generator() -> str:
    """The name of JAX's random generator. With another generator, the same key gives other noise."""
    name = str(jax.random.key_impl(jax.random.key(0)))
    config: Any = jax.config
    whole = name == "threefry2x32" and not config.jax_threefry_partitionable
    return f"{name}, not partitionable" if whole else name


def _key_words() -> int:
    return jax.random.key_data(jax.random.key(0)).size


def words_of(key: jax.Array) -> np.ndarray:
    """The words of a key, which may be a typed key or an array of words.

    Raises:
      TypeError: for anything else.
    """
    if jax.numpy.issubdtype(jax.numpy.result_type(key), jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    elif jax.numpy.result_type(key) != np.uint32:
        raise TypeError("a key is made of words of 32 bits")
    return np.asarray(key, np.uint32)


def of_words(words: np.ndarray) -> jax.Array:
    """The key that is made of these words."""
    return jax.random.wrap_key_data(jax.numpy.asarray(words, jax.numpy.uint32))
