"""The records of a character model, and what a config says of them that is public."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dpx.data import Alphabet, Histories, Texts, friends, shakespeare, split, surnames
from dpx.data import text as own
from dpx.runs.experiment import compares
from dpx.training import users
from experiments import checks

# Of what guarantees are about: what the number of all units decides.
PUBLIC_NUMBER = (
    "the number of {}s, which sets the split, the sampling probability, the batch size "
    "and δ, is public"
)


class Corpus(NamedTuple):
    """Records to train and to test on, and what is public: how they are written, their length and name."""

    train: Texts
    test: Texts
    public: "Public"

    @property
    def unit(self) -> str:
        return self.public.unit

    @property
    def assumptions(self) -> tuple[str, ...]:
        """On which the guarantees rest."""
        return (
            PUBLIC_NUMBER.format(self.unit),
            "the alphabet, what becomes of characters outside it, and the longest admissible "
            f"{self.public.record} are public",
            *([users.ASSUMPTION] if self.public.of_users else []),
        )

    @property
    def histories(self) -> Histories:
        """The training records, or all that each user wrote, as sets of tokens."""
        pairs = zip(self.train.tokens, self.train.mask, strict=True)
        rows = [tokens[mask] for tokens, mask in pairs]
        if self.train.users is not None:
            grouped = users.numbered(self.train.users, self.train.num_units, 1)
            own = np.split(grouped.order, grouped.begins[1:-1])
            rows = [np.concatenate([rows[row] for row in mine]) for mine in own]
        return Histories(tuple(rows), self.public.vocab_size)


class Public(NamedTuple):
    """What a config says about records without a look at them: all that a saved model needs.

    Records that end have one token more than the alphabet, which ends them and stands before their first
    character. Windows do not end, and `start` stands before them.
    """

    alphabet: Alphabet
    length: int  # tokens of a record, its end included
    record: str  # what one is called
    end: int | None
    start: int
    of_users: bool = False

    @property
    def unit(self) -> str:
        """What the guarantees are about."""
        return "user" if self.of_users else self.record

    @property
    def vocab_size(self) -> int:
        return self.alphabet.size + (self.end is not None)

    def encode(self, texts: list[str]) -> Texts:
        """Texts as records; ValueError for one that is too long, or no window of the right length."""
        if self.end is None:
            wrong = sorted({len(text) for text in texts if len(text) != self.length})
            if wrong:
                raise ValueError(f"windows of {wrong} characters: pass {self.length} in each")
            return Texts(np.stack([self.alphabet.encode(text) for text in texts]), None)
        rows = [own.Text(repr(text), text) for text in texts]
        for place, text, *_ in rows:
            if len(self.alphabet.encode(text, place)) >= self.length:
                raise ValueError(f"{place[:60]} is too long: pass at most {self.length - 1} tokens")
        return own.encode(rows, self.alphabet, self.length - 1)

    def decode(self, tokens: np.ndarray) -> list[str]:
        """The texts of records, each up to its end."""
        if self.end is None:
            return [self.alphabet.decode(row) for row in tokens]
        rows = (row[: self.length - 1] for row in tokens)
        return [self.alphabet.decode(row[np.cumsum(row == self.end) == 0]) for row in rows]


def compared_ngrams(config) -> tuple[int, ...]:
    """The orders of the n-gram models that stand beside the others, each for the whole budget."""
    return tuple(config.ngrams) if compares(config) else ()


def check(config) -> None:
    """Raises ValueError for a section `data` that cannot be used."""
    data = config.data
    checks.choice(config, "data.kind", ("surnames", "shakespeare", "text", "friends"))
    needed = {"text": "record", "friends": "record", "shakespeare": "generated"}
    if needed.get(data.kind, "kind") not in data:
        source = "shakespeare" if data.kind == "shakespeare" else "text"
        raise ValueError(
            f"config.data.kind={data.kind!r} needs the settings of configs/{source}.py"
        )
    if data.kind == "text" and data.path is None and not data.generated:
        raise ValueError(
            "config.data.path is missing: give a .txt file, a folder of them, or a table, such as a .csv, "
            ".jsonl or .parquet"
        )
    if data.kind in ("text", "friends"):
        check_texts(config)
        own.alphabet(data.alphabet, data.outside)
    checks.integers(config, "data.limit", "data.split_seed", least=0)


def check_texts(config) -> None:
    """Raises ValueError for what a section `data` says of texts of one's own."""
    checks.choice(config, "data.record", own.RECORDS)
    checks.integers(config, "data.length")
    checks.share(config, "data.held_out")
    checks.integers(config, "data.limit", "data.split_seed", least=0)


@functools.lru_cache(maxsize=4)
def _text(path: str | None) -> str:
    return shakespeare.load_shakespeare(path)


@functools.lru_cache(maxsize=4)
def _names(path: str | None):
    return surnames.encode(surnames.load_surnames(path))


def is_generated(config) -> bool:
    """Whether the records belong to nobody."""
    return config.data.path is None and bool(config.data.get("generated"))


def public(config) -> Public:
    """What the config says about its records; reads no file."""
    data = config.data
    if data.kind == "surnames":
        end, length = surnames.END, surnames.MAX_LETTERS + 1
        return Public(Alphabet(surnames.ALPHABET), length, "name", end, end)
    if data.kind == "shakespeare":
        known = Alphabet(shakespeare.ALPHABET)
        return Public(known, data.length, "window", None, shakespeare.START)
    known, of_users = own.alphabet(data.alphabet, data.outside), data.user is not None
    if data.record == "window":
        return Public(known, data.length, data.record, None, 0, of_users)
    return Public(known, data.length + 1, data.record, known.size, known.size, of_users)


def load(config) -> Corpus:
    """The records that a config names.

    Raises:
      ValueError, FileNotFoundError: for a file that is missing, or that cannot be read as the config says.
    """
    data, known = config.data, public(config)
    if data.kind == "surnames":
        train, test = split(_names(data.path), data.held_out, seed=data.split_seed)
    elif data.kind == "shakespeare":
        generate_it = data.generated and data.path is None
        text = _generated(data.generated, config.seed) if generate_it else _text(data.path)
        windows = shakespeare.encode(text, data.length)
        train, test = shakespeare.split_windows(windows, round(data.held_out * len(windows)))
    elif data.kind == "friends" and not is_generated(config):
        seasons = friends.load_friends(data.path)
        train, test = (_encoded(texts, config, known) for texts in seasons)
    else:
        records = _own_texts(config, known)
        held_out = max(1, round(data.held_out * records.num_units))
        train, test = split(records, held_out, seed=data.split_seed)
    if data.limit:
        train = train.take(slice(data.limit))
    return Corpus(train, test, known)


def _own_texts(config, known: Public) -> Texts:
    data = config.data
    if is_generated(config):
        texts = generated_texts(config)
    else:
        texts = own.load_texts(data.path, record=data.record, column=data.column, user=data.user)
    return _encoded(texts, config, known)


def _encoded(texts: Iterable[own.Text], config, known: Public) -> Texts:
    data = config.data
    if data.user is None:
        texts = (text._replace(user=None) for text in texts)
    if known.end is None:
        return own.encode_windows(texts, known.alphabet, known.length)
    return own.encode(texts, known.alphabet, data.length)


def generated_texts(config) -> list[own.Text]:
    """Lines that belong to nobody, with `data.user` to users who do not exist, of whom some have many."""
    lines = _generated(config.data.generated, config.seed).splitlines()
    texts = [own.Text(f"line {number}", line) for number, line in enumerate(lines)]
    if config.data.user is None:
        return texts
    rng = np.random.default_rng(config.seed)
    whose = rng.integers(0, rng.integers(1, len(texts), len(texts)))
    return [text._replace(user=int(user)) for text, user in zip(texts, whose, strict=True)]


def _generated(length: int, seed: int) -> str:
    """Lines of words drawn by Zipf's law: a text that belongs to nobody."""
    words = ["to", "be", "or", "not", "the", "question", "whether", "Nobler", "in", "mind;"]
    odds = 1 / np.arange(1, len(words) + 1)
    drawn = np.random.default_rng(seed).choice(words, length, p=odds / odds.sum())
    lines = (" ".join(drawn[i : i + 8]) for i in range(0, length, 8))
    return "\n".join(lines)[:length]
