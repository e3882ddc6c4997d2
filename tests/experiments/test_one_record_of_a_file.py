"""Files of the experiments with one record replaced: all others are read, and held out, as they were before.

So they are whatever kind of file holds them.

Replays of configs put arrays in place of files, so that what lies between a file and its arrays is seen here.
"""

import numpy as np
import pandas
import pytest
from all_configs import configured
from own_files import groups, lines, names, play, prompts, sentences, table, write_lines

from dpx.data import Histories
from experiments.cross_attention import labelled
from experiments.cross_attention import table as memory
from experiments.dp_transformer import corpus, documents, from_scratch, labelled_texts
from experiments.dp_transformer import histories as recommender_data
from experiments.gram import one_release
from experiments.noisy_head import texts


def arrays_of(found):
    """The arrays of a tree of tuples: each has a row for every record of its kind."""
    if isinstance(found, Histories):
        return arrays_of(list(found.items))
    if isinstance(found, list):  # users have as many items as they like
        rows = [np.pad(items, (0, 20 - len(items)), constant_values=-1) for items in found]
        return [np.stack(rows)]
    if isinstance(found, np.ndarray):
        return [found]
    if hasattr(found, "mask"):
        return [found.tokens, found.mask]
    parts = found if isinstance(found, tuple) else ()
    return [array for part in parts for array in arrays_of(part)]


ODD_LINES = ("dado " * 30, "é" * 5, "xyz", "9,9", "ab\u2028cd", "bad cab")
ODD_USERS = ([11] * 18, [3, 1, 2, 2, 2, 2, 2, 2, 2, 2])
READERS = {
    "text": ("text:tiny", write_lines, corpus.load, ODD_LINES),
    "windows": ("shakespeare:tiny", play, corpus.load, ("Zounds! " * 2, " " * 16)),
    "names": ("quickstart:tiny", names, corpus.load, ("abcdefghijklm", "a")),
    "documents": (
        "finetune:tiny",
        lambda folder, odd: write_lines(folder, odd) | {"data.record": "line"},
        lambda config: documents.load(config, documents.Bytes()),
        ODD_LINES,
    ),
    "characters": (
        "finetune:scratch,tiny",
        lambda folder, odd: write_lines(folder, odd) | {"data.record": "line"},
        from_scratch._corpus,
        ODD_LINES,
    ),
    "histories": ("recommender:amazon,tiny", table, recommender_data.prepare, ODD_USERS),
    "released": ("gram:recommender,tiny", table, one_release._evaluated, ODD_USERS),
    "labelled": (
        "cross_attention:retrieval,tiny",
        groups,
        labelled.load,
        ("aa ab ac,a", "zz " * 400 + ",b", "nothing,c"),
    ),
    "encoded": (
        "cross_attention:sentences,tiny",
        sentences,
        labelled.load,
        ("a1 a2 a3,negative", "w1 " * 400 + ",positive", "other,positive"),
    ),
    "prompts": ("noisy_head:text,tiny", prompts, texts.read, (*ODD_LINES[:1], "zz yy xx")),
}


@pytest.mark.parametrize("name", READERS)
def test_one_record_changes_its_own_row_alone(name, tmp_path):
    source, write, read, odd = READERS[name]

    def found(replaced=None):
        (folder := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        given = write(folder, replaced)
        config = configured(source, folder)
        flat = {k: v for k, v in given.items() if k.split(".")[-1] in config.get("data", {})}
        config.update_from_flattened_dict(flat)
        return arrays_of(read(config))

    before, changes = found(), 0
    assert before
    for replaced in odd:
        after = found(replaced)
        assert [(a.shape, a.dtype) for a in before] == [(a.shape, a.dtype) for a in after]
        # Arrays of one length are of the same records, whether those are held out or not.
        rows = {
            (len(a), int(row))
            for a, b in zip(before, after, strict=True)
            for row in np.flatnonzero((a != b).reshape(len(a), -1).any(axis=1))
        }
        assert len(rows) <= 1
        changes += len(rows)
    assert changes


OWN = {"data.column": "said", "data.user": "who"}
NAMES = {"data.text": "said", "data.label": "label", "data.labels": ("7", "up")}
# How each config that names columns of a table reads one, and what it calls them.
TABLES = {
    "text:tiny": (corpus.load, OWN),
    "finetune:tiny": (lambda config: documents.load(config, documents.Bytes()), OWN),
    "finetune:scratch,tiny": (from_scratch._corpus, OWN),
    "classify:table,tiny": (labelled_texts.load, NAMES | {"data.user": "who"}),
    "cross_attention:sentences,tiny": (labelled.load, NAMES | {"data.kind": "table"}),
    "cross_attention:retrieval,tiny": (
        labelled.load,
        {"num_groups": 2, "data.generated": 0, "data.column": "said"},
    ),
    "cross_attention:table,tiny": (memory._load, {"data.key": "a,time", "data.value": "b"}),
    "noisy_head:text,tiny": (texts.read, {"data.column": "said"}),
    "recommender:table,tiny": (
        recommender_data.prepare,
        {"data.user": "who", "data.item": "label", "data.time": "time"},
    ),
}


@pytest.mark.parametrize("source", TABLES)
def test_every_kind_of_file_holds_the_same_table(source, tmp_path):
    read, columns = TABLES[source]
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "said": [
                f"{line}, " + " ".join(chr(97 + number % step) * step for step in (11, 13, 17))
                for number, line in enumerate(lines(200))
            ],
            "label": [7 if number % 3 else "up" for number in range(200)],
            "who": [f"u{number // 4}" for number in range(200)],
            "time": rng.permutation(200),
            "a": rng.integers(0, 99, 200) / 8,
            "b": rng.integers(0, 99, 200) / 8,
        }
    )
    frame["text"], frame["Category"] = frame.said, frame.label
    frame = frame.astype({"label": str, "Category": str})
    found = []
    for kind in ("csv", "tsv.gz", "jsonl", "jsonl.gz", "parquet"):
        path = tmp_path / f"own.{kind}"
        if kind == "parquet":
            frame.to_parquet(path)
        elif "json" in kind:
            frame.to_json(path, orient="records", lines=True)
        else:
            frame.to_csv(path, index=False, sep="\t" if "tsv" in kind else ",")
        config = configured(source, tmp_path)
        known = {"num_groups", *(f"data.{name}" for name in config.data)}
        paths = {"data.path": str(path), "data.test_path": str(path)} | {
            "data.public_path": None if read is texts.read else str(path)
        }
        given = {key: value for key, value in (paths | columns).items() if key in known}
        config.update_from_flattened_dict(given)
        found.append(arrays_of(read(config)))
    assert found[0]
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, another)
