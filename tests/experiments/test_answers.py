"""Answers in words: the odds of the labels' words, and what a release adds to them."""

import re

import jax
import numpy as np
import pytest
from command_line import call
from flax import nnx
from ml_collections import ConfigDict

import dpx
from configs import cross_attention
from dpx.nn.pretrained import Decoder, DecoderSettings
from experiments.cross_attention import answers, clipped_logits, labelled, retrieval
from experiments.cross_attention.classifiers import memory_scores
from experiments.dp_transformer.documents import Bytes


def section(**changed):
    given = {
        "kind": "random",
        "path": None,
        "template": "Review: {}.",
        "words": ("no", "yes"),
        "length": 9,
    }
    return ConfigDict(given | changed)


@pytest.mark.slow
@pytest.mark.parametrize("shown", [None, "an example"])
def test_odds_are_those_of_the_model_after_each_text_alone(shown):
    texts = ["good", "", "a long one that is cut", "bad"] * 5
    before = "" if shown is None else f"Review: {shown[:9]}.yes\n\n"
    found = answers.reader(section())(texts, [] if shown is None else [(shown, "yes")] * 20)
    settings = DecoderSettings(Bytes.vocab_size, dim=16, num_layers=2, num_heads=2)
    model = Decoder(settings, rngs=nnx.Rngs(0))
    for text, row in zip(texts, found, strict=True):
        (asked,) = Bytes().encode([f"{before}Review: {text[:9]}."])
        logits = model(np.concatenate([[Bytes.start], asked]))[-1]
        expected = jax.nn.log_softmax(logits)[np.array([ord("n"), ord("y")])]
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)


def test_a_release_decides_where_the_model_does_not():
    rng = np.random.default_rng(0)
    truth = rng.integers(2, size=200)
    public, private = np.arange(100), np.arange(100, 200)
    # A model that says the first word nearly always, and a release that is right.
    odds = rng.normal(size=(200, 2)) * 0.1 + [5.0, 0.0]
    scores = np.where(np.eye(2)[truth] > 0, 0.55, 0.45)
    parts = odds[private], odds[public], scores[private], scores[public]
    assert (odds[private].argmax(1) == 0).all()
    calibrated = (answers.answered(*parts[:2]).argmax(1) == truth[private]).mean()
    found = answers.biased(*parts)
    assert calibrated < 0.65 < 0.8 < (found.argmax(1) == truth[private]).mean()
    # The size of the scores tells nothing, and what is no share is as small as can be.
    again = answers.biased(*parts[:2], 7 * parts[2], 7 * parts[3])
    np.testing.assert_allclose(again, found, atol=1e-9)
    scores[0], scores[1] = [-0.1, 0.2], [0.0, 0.0]
    assert np.isfinite(answers.biased(odds, odds, scores, scores)).all()
    # A release that tells nothing changes nothing.
    flat = np.ones((100, 2))
    same = answers.biased(*parts[:2], flat, flat)
    np.testing.assert_array_equal(same.argmax(1), answers.answered(*parts[:2]).argmax(1))


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_a_private_text_in_the_prompt_moves_the_odds_of_two_words_by_epsilon(temperature):
    rng = np.random.default_rng(0)
    base, moved = rng.normal(size=(50, 3)), 9 * rng.normal(size=(50, 4, 3))
    moved[:, 0] = 1e3 * np.eye(3)[0] - 500  # it says one word as loudly as it can
    clip = clipped_logits.clip_norm(1.5, 4, temperature)
    without = moved.copy()
    without[:, 0] = 0
    (one, other) = (
        np.log(clipped_logits.shares(base, x, clip, temperature)) for x in (moved, without)
    )
    ratios = one - other
    spread = ratios.max(1) - ratios.min(1)
    np.testing.assert_allclose(spread, 1.5, rtol=1e-5)  # the bound, reached
    assert np.abs(ratios).max() < 1.5 + 1e-9


@pytest.mark.slow
def test_clipped_logits_of_made_up_texts_are_printed():
    ended = call("cross_attention.clipped_logits", "--tiny", "--asked=10", "--examples=2")
    assert ended.returncode == 0, ended.stderr
    rows = re.findall(r"drawn at T = [\d.]+ \| 0\.\d+ ± ", ended.stdout)
    assert len(rows) == len(clipped_logits.TEMPERATURES)
    ended = call("cross_attention.clipped_logits", "--tiny", "--asked=10", "--examples=2000")
    assert "--asked=10 must be at most" in ended.stderr + ended.stdout


@pytest.mark.slow
def test_words_are_biased_by_what_was_released(tmp_path, monkeypatch):
    """Of exact attention, a record moves what is said by too little to be seen in an accuracy."""
    seen = {}

    def spying(language, data, releases):
        seen.update({row: scores(data.queries) for row, scores in releases.items()})
        return {f"words_{row}": scores for row, scores in seen.items()}

    monkeypatch.setattr(answers, "in_words", spying)
    config = cross_attention.get_config("sentences,tiny")
    outcome = retrieval.run(config, tmp_path)
    queries = labelled.load(config).queries
    released = memory_scores(dpx.load(tmp_path / retrieval.RELEASE), queries)
    np.testing.assert_array_equal(seen["sketch"], released)
    for row in seen:
        assert outcome.releases[f"words_{row}"] == outcome.releases[row]
        assert f"words_{row}" not in (outcome.composed or {})
