"""Sentences of film reviews, rated by twenty people each (Hutto and Gilbert, ICWSM 2014; MIT licence)."""

import math
from pathlib import Path

from dpx.data import files
from dpx.data.text import Text

LABELS = ("negative", "positive")
_PUBLISHED = (
    "https://files.pythonhosted.org/packages/77/8c/"
    "4a48c10a50f750ae565e341e697d74a38075a3e43ff0df6f1ab72e186902/vaderSentiment-3.3.2.tar.gz",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
)
# The ratings are in an archive inside of the archive.
_PLACE = ("hutto_ICWSM_2014.tar.gz", "movieReviewSnippets_GroundTruth.txt")


def load_sentences(path: str | Path | None = None) -> list[Text]:
    """10,605 sentences with labels: "positive" if the mean rating is above zero, otherwise "negative".

    Args:
      path: The source distribution of `vaderSentiment` 3.3.2, or its file of ratings; None downloads it and
        checks its sha256. The errors are those of `dpx.data.load_movielens_1m`.
    """
    path = files.published(path, *_PUBLISHED)
    packed = path.name.endswith(".tar.gz")
    text = files.archived(path, *_PLACE).decode() if packed else files.read_text(path)

    def parse(line: str) -> tuple[str, str]:
        _, rating, sentence = line.split("\t", 2)
        if not (sentence.strip() and math.isfinite(float(rating))):
            raise ValueError("no sentence, or no rating")
        return sentence.strip(), LABELS[float(rating) > 0]

    expected = "number, rating and sentence, with tabs between"
    rows = files.parse_lines(path, text, parse, expected, "sentence")
    return [
        Text(f"{path}: row {number}", sentence, label=label)
        for number, (sentence, label) in enumerate(rows, start=1)
    ]
