"""Files of one's own, as configs read them, with an odd record in the place of one or without it.

A writer takes a folder and the odd record, or None, and returns the settings of a config that reads the file.
"""

import numpy as np

from experiments.cross_attention import labelled

WORDS = ("ab", "cd", "abba", "dado", "cab", "bad")
TABLE = {"kind": "table", "text": "text", "label": "label"}
# The record that may be replaced is a short one, and there is another one like it.
PLACE = 7


def lines(count=400):
    rng = np.random.default_rng(0)
    found = [" ".join(rng.choice(WORDS, rng.integers(1, 4))) for _ in range(count)]
    found[PLACE] = found[PLACE + 5] = "ab"
    return found


def write_lines(folder, odd):
    rows = lines()
    rows[PLACE] = odd or rows[PLACE]
    (folder / "own.txt").write_text("\n".join(rows))
    return {"data.path": str(folder / "own.txt")}


def names(folder, odd):
    letters = "abcdefghij"
    rows = [a + b + c for a in letters for b in letters for c in letters]
    rows[PLACE] = odd or rows[PLACE + 5]
    (folder / "own.txt").write_text("\n".join(rows))
    return {"data.path": str(folder / "own.txt"), "data.held_out": 30, "data.limit": 0}


def play(folder, odd):
    text = "to be or not to be. " * 60
    (folder / "own.txt").write_text(text[:400] + (odd or text[400:416]) + text[416:])
    return {"data.path": str(folder / "own.txt"), "data.held_out": 0.2}


def table(folder, odd):
    rng = np.random.default_rng(0)
    users = [rng.integers(0, 12, rng.integers(3, 6)).tolist() for _ in range(40)]
    users[PLACE] = odd or users[PLACE]
    rows = [f"{user + 1} {item + 1}" for user, items in enumerate(users) for item in items]
    (folder / "own.txt").write_text("\n".join(rows))
    return {"data.path": str(folder / "own.txt"), "data.min_count": 0}


def groups(folder, odd):
    private, public = (
        [f"{text},{group}" for text, group in zip(*labelled._generated(count, rng), strict=True)]
        for count, rng in ((60, np.random.default_rng(0)), (200, np.random.default_rng(1)))
    )
    private[PLACE] = odd or private[PLACE + 5]
    for name, rows in (("private", private), ("public", public)):
        (folder / f"{name}.csv").write_text("\n".join(["text,Category", *rows]))
    paths = {
        "data.path": str(folder / "private.csv"),
        "data.public_path": str(folder / "public.csv"),
    }
    return paths | {"data.generated": 0}


def sentences(folder, odd):
    names = ("negative", "positive")
    later = [f"{'ab'[i % 2]}{i % 7} w{i % 5} w{i % 3},{names[i % 2]}" for i in range(60)]
    private = [*later]
    private[PLACE] = odd or private[PLACE + 5]
    for name, rows in (("private", private), ("later", later)):
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    paths = {"path": str(folder / "private.csv"), "test_path": str(folder / "later.csv")}
    return {f"data.{key}": value for key, value in (paths | TABLE).items()}


def prompts(folder, odd):
    for number, text in enumerate(lines()):
        (folder / f"{number:03}.txt").write_text(odd if odd and number == PLACE else text)
    return {"data.path": str(folder)}


# Of configs that need no file, how one's own is written.
OWN_FILES = {
    "quickstart:tiny": names,
    "cross_attention:sentences,tiny": sentences,
    "cross_attention:retrieval,tiny": groups,
    "gram:features,tiny": groups,
    "text:tiny": write_lines,
    "finetune:pretrained,tiny": write_lines,
    "finetune:scratch,tiny": write_lines,
    "next_tokens:tiny": write_lines,
}
