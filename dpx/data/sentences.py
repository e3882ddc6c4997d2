"""Sentences of film reviews, rated by twenty people each (Hutto and Gilbert, ICWSM 2014; MIT licence)."""

import io
import math
import tarfile
import zlib
from pathlib import Path

from dpx.data import files
from dpx.data.text import Text

LABELS = ("negative", "positive")
_URL = (
    "https://files.pythonhosted.org/packages/77/8c/"
    "4a48c10a50f750ae565e341e697d74a38075a3e43ff0df6f1ab72e186902/vaderSentiment-3.3.2.tar.gz"
)
_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
_FILE = "movieReviewSnippets_GroundTruth.txt"


def load_sentences(path: str | Path | None = None) -> list[Text]:
    """10,605 sentences with labels: "positive" if the mean rating is above zero, otherwise "negative".

    Args:
      path: The source distribution of `vaderSentiment` 3.3.2, or its file of ratings; None downloads it and
        checks its sha256.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for an archive that cannot be read, or a malformed line, with its number.
    """
    path = files.download(_URL, _SHA256) if path is None else files.existing(path)
    text = _unpacked(path) if path.name.endswith(".tar.gz") else files.read_text(path)

    def parse(line: str) -> tuple[str, str]:
        _, rating, sentence = line.split("\t", 2)
        if not (sentence.strip() and math.isfinite(float(rating))):
            raise ValueError("no sentence, or no rating")
        return sentence.strip(), LABELS[float(rating) > 0]

    expected = "number, rating and sentence, with tabs between"
    rows = files.parse_lines(path, text.split("\n"), parse, expected)
    sentences = [
        Text(f"{path}: row {number}", sentence, label=label)
        for number, (sentence, label) in enumerate(rows, start=1)
    ]
    if not sentences:
        raise ValueError(f"{path} holds no sentence")
    return sentences


def _unpacked(path: Path) -> str:
    """The text of the ratings, which are in an archive inside of the archive."""
    try:
        inner = _member(path.read_bytes(), "hutto_ICWSM_2014.tar.gz")
        return _member(inner, _FILE).decode()
    except (tarfile.TarError, zlib.error, EOFError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be unpacked ({error}): fetch it again") from None


def _member(archive: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for member in opened:
            file = opened.extractfile(member) if member.name.rsplit("/", 1)[-1] == name else None
            if file is not None:
                return file.read()
    raise tarfile.ReadError(f"it holds no {name}")
