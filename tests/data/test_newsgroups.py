"""Texts as prompts: the loaders, TF-IDF from public input, and responses scaled by public constants."""

import math

import numpy as np
import pytest

from dpx.data import newsgroups

TEXTS = [f"alpha {'beta ' * (i % 5 + 1)} gamma{'x' * (i % 3)} delta" for i in range(23)]


def test_scores_are_tfidf():
    frequencies = newsgroups.document_frequencies(
        ["one two", "two three", "two three four"], min_documents=1
    )
    assert frequencies.counts == {"one": 1, "two": 3, "three": 2, "four": 1}
    scores = newsgroups.tfidf_top("Two two THREE unheard, four", frequencies, 5)
    expected = np.array([2 * (math.log(4 / 4) + 1), math.log(4 / 3) + 1, math.log(4 / 2) + 1])
    expected = np.sort(expected)[::-1] / np.linalg.norm(expected)
    np.testing.assert_allclose(scores, [*expected, 0, 0])
    assert np.linalg.norm(newsgroups.tfidf_top("two three", frequencies, 1)) <= 1
    assert not newsgroups.tfidf_top("a a b b", frequencies, 2).any()
    counted = newsgroups.tfidf_top("aa aa bb", None, 2)
    np.testing.assert_allclose(counted, np.array([2, 1]) / math.sqrt(5))


def test_a_document_changes_one_prompt_only():
    """What makes a guarantee for prompts cover documents: neither scores nor scaling look at other rows."""
    settings = {"dim": 3, "length": 4, "seed": 1}
    before = newsgroups.text_prompts(TEXTS, None, **settings)
    assert before.x.shape == (4, 5, 3)
    assert before.y.shape == (4, 5)
    for victim in range(len(TEXTS)):
        texts = list(TEXTS)
        texts[victim] = "word " * 10_000
        after = newsgroups.text_prompts(texts, None, **settings)
        changed = np.any(before.x != after.x, axis=(1, 2)) | np.any(before.y != after.y, axis=1)
        assert changed.sum() <= 1


def test_response_is_the_scaled_log_length():
    x, y = newsgroups.text_prompts(
        ["aa bb cc"] * 4, None, dim=2, length=1, typical_tokens=7.0, log_spread=2.0
    )
    np.testing.assert_allclose(y, (math.log(4) - math.log(8)) / 2)
    np.testing.assert_allclose(x, 1 / math.sqrt(3))


def test_loads_folders_and_tables(tmp_path):
    folder = tmp_path / "texts" / "group"
    folder.mkdir(parents=True)
    for i, text in enumerate(TEXTS[:3]):
        (folder / f"{i}.txt").write_text(text)
    assert newsgroups.load_texts(tmp_path / "texts") == TEXTS[:3]
    text = 'label,text\na,"hello, world"\nb,again\nc,""\n'
    assert read(tmp_path, "t.csv", text) == ["hello, world", "again"]
    assert read(tmp_path, "t.csv", text, column="label") == ["a", "b", "c"]
    orange = "Category\tText\nd\tstring\nclass\t\n\nrec.autos\tcars are fast\n"
    assert read(tmp_path, "t.tab", orange) == ["cars are fast"]


def read(tmp_path, name, text, **settings):
    (tmp_path / name).write_text(text)
    return newsgroups.load_texts(tmp_path / name, **settings)


def test_no_document_decides_what_is_read_of_others(tmp_path):
    """Neither which column is read, nor how many lines are header."""
    for first in ("a short title,a long body of text", "a title that is much longer than it,short"):
        with pytest.raises(ValueError, match="one of title, words"):
            read(tmp_path, "t.csv", f"title,words\n{first}\none,first\ntwo,second\n")
    for first in ('""', "c", "string"):
        rest = read(tmp_path, "t.csv", f"text\n{first}\nhello world\nbye now\n")[-2:]
        assert rest == ["hello world", "bye now"]
    with pytest.raises(ValueError, match=r"must be Orange's.*save another one as \.tsv"):
        read(tmp_path, "t.tab", "text\nhello world\nbye now\n")
    orange = "text\tgroup\nstring\td\nmeta\tclass\n{}\tx\nhello\ty\n"
    for first in ("d", "meta", "words"):
        assert read(tmp_path, "t.tab", orange.format(first)) == [first, "hello"]
    with pytest.raises(ValueError, match="one of words"):  # which could be the first document
        read(tmp_path, "t.csv", "words\nonly column\n")
    assert read(tmp_path, "t.csv", "words\nonly column\n", column="words") == ["only column"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: newsgroups.text_prompts(TEXTS, None, length=30), "do not fill a prompt"),
        (lambda: newsgroups.text_prompts(TEXTS, None, length=0), "length=0 must be at least 1"),
        (lambda: newsgroups.text_prompts(TEXTS, None, typical_tokens=0.0), "typical_tokens=0"),
        (lambda: newsgroups.document_frequencies(["unique words", "other"]), "public corpus"),
    ],
)
def test_misuse(call, words):
    with pytest.raises(ValueError, match=words):
        call()
