"""Private classification: what is read, what is measured, and what a run leaves."""

import io
import tarfile

import folders
import jax
import numpy as np
import pytest
from all_configs import executed
from command_line import call
from sklearn import metrics

from dpx.data import sentences
from dpx.nn import pretrained
from dpx.runs import query, records, run
from experiments.dp_transformer import classifier, classify, feature_center, labelled_texts
from experiments.dp_transformer.pieces import in_pieces

SOURCE = "classify:sentences,tiny"


def table(folder, rows, name="own.csv"):
    path = folder / name
    path.write_text("\n".join(["message,team,who", *rows]))
    config = records.load_config("classify:table,tiny")
    config.data.update({"path": str(path), "text": "message", "label": "team"})
    config.data.labels = ("no", "yes")
    return config


def test_labels_are_those_that_are_named_and_not_those_that_there_are(tmp_path):
    config = table(tmp_path, [f"text {i},yes,a" for i in range(10)])
    train, test = labelled_texts.load(config)
    assert set(train.labels) == set(test.labels) == {1}
    config.data.labels = (" yes", "no ")  # cells are read without space around
    assert set(labelled_texts.load(config)[0].labels) == {0}
    config = table(tmp_path, ["one,yes,a", "two,maybe,a", "three,no,b"])
    with pytest.raises(ValueError, match=r"line 3 has the label 'maybe'"):
        labelled_texts.load(config)


def test_users_of_a_table_are_the_unit(tmp_path):
    rows = [f"text {i},{'yes' if i % 2 else 'no'},u{i % 7}" for i in range(70)]
    config = table(tmp_path, rows)
    config.data.user = "who"
    config.train.batch_size = 3
    train, test = labelled_texts.load(config)
    assert (train.num_units, test.num_units) == (6, 1)
    assert (len(train), len(test)) == (60, 10)
    planned = classify.plan(config)
    assert list(planned.releases) == ["dp_classifier"]
    config.non_private.steps = 0
    classify.validate(config)  # no batch of words is too large where words are not read
    config.comparisons, config.words.batch_size = True, 3
    classify.validate(config)
    planned = classify.plan(config)
    assert list(planned.releases) == ["dp_classifier", "dp_prototypes", "dp_words"]
    assert {spent.unit for spent in planned.releases.values()} == {"user"}


def archive(path, ratings):
    def add(opened, name, content):
        about = tarfile.TarInfo(name)
        about.size = len(content)
        opened.addfile(about, io.BytesIO(content))

    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as opened:
        add(opened, "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt", ratings)
    with tarfile.open(path, "w:gz") as opened:
        add(opened, "v/additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue())


def test_sentences_have_the_sign_of_their_rating(tmp_path):
    ratings = "1\t2.27\tA fine film.\n2\t-0.6\tToo long\n3\t0\tA film\n"
    path = tmp_path / "vaderSentiment-3.3.2.tar.gz"
    archive(path, ratings.encode())
    (tmp_path / "ratings.txt").write_text(ratings)
    for place in (path, tmp_path / "ratings.txt"):
        found = sentences.load_sentences(place)
        assert [(one.text, one.label) for one in found] == [
            ("A fine film.", "positive"),
            ("Too long", "negative"),
            ("A film", "negative"),
        ]
    for wrong in ("1\t2\n", "1\tnan\ttext\n", "1\t2\t \n"):
        (tmp_path / "ratings.txt").write_text(wrong)
        with pytest.raises(ValueError, match="line 1 is malformed"):
            sentences.load_sentences(tmp_path / "ratings.txt")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be unpacked"):
        sentences.load_sentences(path)


def test_measures_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    logits, truth = rng.normal(size=(200, 4)), rng.integers(0, 3, 200)
    logits[:, 3] -= 9  # a label that nobody has and nobody is told
    said = logits.argmax(1)
    found = {m.metric: m.value for m in classify._measures("dp_words", logits, truth)}
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(truth, said))
    f1 = metrics.f1_score(truth, said, labels=range(4), average="macro", zero_division=0.0)
    assert found["macro_f1"] == pytest.approx(f1)
    counts = metrics.confusion_matrix(truth, said, labels=range(4))
    np.testing.assert_array_equal(classify.confusion(logits, truth), counts)


def test_the_calibration_error_is_how_far_confidence_is_from_accuracy():
    logits = np.log(np.array([[0.8, 0.2]] * 10 + [[0.4, 0.6]] * 10))
    truth = np.array([0] * 5 + [1] * 5 + [1] * 8 + [0] * 2)
    assert classify.calibration_error(logits, truth) == pytest.approx((0.3 + 0.2) / 2)


def test_counts_of_words_are_those_of_a_text_alone():
    texts = ["A film, a good film!", "good", "", "zzz yyy"]
    whole = classify.hashed(texts, 64)
    for row, text in zip(whole, texts, strict=True):
        np.testing.assert_array_equal(row, classify.hashed([text], 64)[0])
    np.testing.assert_allclose(np.square(whole).mean(1), [1, 1, 0, 1], rtol=1e-6)
    assert np.count_nonzero(whole[0]) == 2  # words have two letters or more


def test_rows_are_always_read_as_many_at_a_time():
    shapes = set()

    def function(rows):
        shapes.add(rows.shape)
        return 2 * rows

    for count in (150, 3):
        np.testing.assert_array_equal(in_pieces(function, count, 64), 2 * np.arange(count))
    assert shapes == {(64,)}


def test_a_run_goes_on_with_the_same_words_alone(tmp_path, monkeypatch):
    """Words beyond the tokens that the model reads are released too."""
    config, begun = records.load_config(SOURCE), []

    def opened(config, workdir, *, synthetic, data):
        begun.extend(data)
        raise KeyboardInterrupt

    monkeypatch.setattr(classify, "open_keys", opened)
    with pytest.raises(KeyboardInterrupt):
        classify.run(config, tmp_path)
    words = classify.hashed(labelled_texts.load(config)[0].texts, config.words.dim)
    assert any(np.array_equal(x, words) for x in begun)


def center(features, users=None, fraction=0.02, epsilon=8.0):
    config = records.load_config(SOURCE)
    config.center_budget_fraction, config.epsilon = fraction, epsilon
    return feature_center.private(jax.random.key(0), config, features, users)


def test_the_mean_that_is_subtracted_counts_every_unit_alike():
    x = np.random.default_rng(0).normal(size=(60, 8)).astype("f4") + 1
    unit = x / np.sqrt(np.square(x).mean(1, keepdims=True))
    np.testing.assert_allclose(center(x, epsilon=1e8), unit.mean(0), atol=1e-4)
    np.testing.assert_allclose(feature_center.exact(x, None), unit.mean(0), atol=1e-6)
    users = np.arange(60) % 7
    of_users = np.mean([unit[users == user].mean(0) for user in range(7)], axis=0)
    np.testing.assert_allclose(center(x, users, epsilon=1e8), of_users, atol=1e-3)
    x[3] = np.nan  # a text that is not finite adds nothing
    unit[3] = 0
    np.testing.assert_allclose(center(x, epsilon=1e8), unit.mean(0), atol=1e-4)


def test_the_mean_that_is_subtracted_is_paid_for():
    """Without it training needs less noise, and with it both together cost the budget."""
    config, noise = records.load_config(SOURCE), {}
    for fraction in (0.0, 0.3):
        config.center_budget_fraction = fraction
        planned = classify.plan(config)
        noise[fraction] = planned.parameters["noise_multiplier"]
        headline = planned.releases["dp_classifier"]
        assert 0.95 * config.epsilon < headline.epsilon <= config.epsilon
        assert (feature_center.LABEL in headline.mechanism) == (fraction > 0)
    assert noise[0.3] > 1.05 * noise[0.0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classify")
    config = records.load_config(SOURCE)
    return executed(config, SOURCE, folder)


@pytest.mark.slow
def test_a_run_leaves_a_classifier(finished):
    model = classify.load(records.load_config(SOURCE), finished.workdir)
    found = model.predict(["a1 a2 w3", "b1 b2", ""])
    assert [list(odds) for odds in found] == [["negative", "positive"]] * 3
    np.testing.assert_allclose([sum(odds.values()) for odds in found], 1, rtol=1e-6)
    _, test = labelled_texts.load(records.load_config(SOURCE))
    said = [max(odds, key=odds.__getitem__) for odds in model.predict(list(test.texts))]
    right = np.mean(
        [("negative", "positive")[y] == x for x, y in zip(said, test.labels, strict=True)]
    )
    assert finished.metrics["dp_classifier/accuracy"] == pytest.approx(right)
    assert classify.figures([finished], finished.workdir)
    assert query.model_of(finished.workdir, "predict")


@pytest.mark.slow
def test_predictions_on_the_command_line(finished):
    ended = call("predict", f"--workdir={finished.workdir}", "--text=a1 a2", "--text=b3")
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 2
    assert {word for word in ended.stdout.split() if word.isalpha()} == {"negative", "positive"}
    for arguments, words in (((), "--text is missing"), (("--count=1",), "is no flag")):
        ended = call("predict", f"--workdir={finished.workdir}", *arguments)
        assert ended.returncode == 2
        assert words in ended.stderr


def with_tokenizer(folder, kind="bert"):
    """A tiny model with a tokenizer of whole words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *(f"{letter}{n}" for letter in "abw" for n in range(9)),
    ]
    numbers = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    around = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = tokenizers.processors.BertProcessing(*reversed(around))
    folders.changed(folder, kind)
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", ["bert", "gemma3"])
def test_features_are_those_of_a_text_alone(tmp_path, kind, monkeypatch):
    """Of an encoder the mean states of all tokens, and of a decoder those of the last token of a text.

    They have the same bits whichever texts are read beside it, as privacy needs.
    """
    monkeypatch.setattr(classifier, "_WIDTH", 4)
    config = records.load_config(SOURCE)
    path = with_tokenizer(tmp_path / "model", kind)
    config.model.update({"kind": "pretrained", "path": str(path), "kept_layers": 2})
    config.tune.mode, config.data.length, config.model.read_layers = "probe", 16, 2
    model = classifier.build(config)
    plain = pretrained.load(path)
    texts = ["a1", "b2 a1 w0", "w1 " * 6, "b1 " * 30, "w3 w4"]
    arrays = pretrained.padded(model.tokenizer.encode(texts, model.length), model.length)
    found = classifier.frozen_features(model, *arrays)
    for row, tokens in zip(found, model.tokenizer.encode(texts, model.length), strict=True):
        states = [np.asarray(x, np.float64) for x in plain.states(tokens, last=2)]
        each = [x.mean(0) if kind == "bert" else x[-1] for x in states]
        expected = np.concatenate([x / np.sqrt(np.square(x).mean()) for x in each])
        np.testing.assert_allclose(row, expected / np.sqrt(np.square(expected).mean()), atol=2e-5)
    for left_out in range(len(texts)):
        rest = np.arange(len(texts)) != left_out
        fewer = classifier.frozen_features(model, *(x[rest] for x in arrays))
        np.testing.assert_array_equal(fewer, found[rest])


@pytest.mark.parametrize("kind", ["bert", "gemma3"])
def test_states_that_no_adapter_changes_are_computed_once(tmp_path, kind, monkeypatch):
    """Training from them is training from tokens, and no text changes the bits of another one."""
    monkeypatch.setattr(classifier, "_WIDTH", 4)
    config = records.load_config(SOURCE)
    path = with_tokenizer(tmp_path / "model", kind)
    config.model.update({"kind": "pretrained", "path": str(path), "kept_layers": 2})
    config.model.read_layers = 2
    config.tune.update({"mode": "lora", "layers": 1, "rank": 2})
    config.data.update({"length": 16, "generated": 60})
    config.train.update({"steps": 3, "batch_size": 20, "l2_clip_norm": 0.5})
    config.update({"noise_seed": 5, "comparisons": False, "non_private": {"steps": 0}})
    model = classifier.build(config)
    assert model.start == 1
    texts = ["a1", "b2 a1 w0", "w1 " * 6, "b1 " * 30, "w3 w4"]
    arrays = pretrained.padded(model.tokenizer.encode(texts, model.length), model.length)
    states = classifier.trunk(model, *arrays)
    for left_out in range(len(texts)):
        rest = np.arange(len(texts)) != left_out
        fewer = classifier.trunk(model, *(x[rest] for x in arrays))
        np.testing.assert_array_equal(fewer, states[rest])

    widths, loss = [], classifier.loss
    monkeypatch.setattr(classifier, "loss", lambda *a: (widths.append(a[3].shape), loss(*a))[1])
    found = {}
    for way in ("once", "each time"):
        if way == "each time":
            monkeypatch.setattr(classifier, "trunk_of", lambda _: lambda texts: classifier._tokens(
                model, list(texts)
            )[0])  # fmt: skip
        executed(config, SOURCE, tmp_path / way)
        saved = classifier.load(config, tmp_path / way)
        found[way] = jax.tree.leaves(saved._trained)
        assert {len(shape) for shape in widths} == {2 if way == "once" else 1}
        widths.clear()
    for once, each in zip(found["once"], found["each time"], strict=True):
        np.testing.assert_allclose(once, each, atol=2e-4)


def test_a_decoder_loses_its_last_third_unless_its_layers_are_counted(tmp_path):
    config = records.load_config(SOURCE)
    path = with_tokenizer(tmp_path / "model", "qwen2_windows")
    config.model.update({"kind": "pretrained", "path": str(path), "read_layers": 1})
    config.tune.mode, config.data.length = "probe", 16
    tokens = np.array([[5, 6, 7, 8]])
    plain = pretrained.load(path)
    whole = plain.settings.num_layers
    for given, kept in ((0, -(-2 * whole // 3)), *((n, n) for n in range(1, whole + 1))):
        config.model.kept_layers = given
        model = classifier.build(config)
        expected = np.asarray(plain.states(tokens[0], last=whole)[kept - 1][-1])
        found = classifier.frozen_features(model, tokens, np.ones((1, 4), bool))[0]
        expected = expected / np.sqrt(np.square(expected).mean())
        np.testing.assert_allclose(found, expected, atol=2e-5)
    config.model.kept_layers = whole + 1
    with pytest.raises(ValueError, match=f"kept_layers={whole + 1} must be at most {whole}"):
        classifier.build(config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gemma3"])
@pytest.mark.parametrize("mode", ["probe", "lora", "full"])
def test_a_pretrained_model_starts_as_it_is(tmp_path, mode, kind):
    """New adapters and a head of zeros change no feature, and every mode reads the same ones."""
    config = records.load_config(SOURCE)
    config.model.update(
        {"kind": "pretrained", "path": str(with_tokenizer(tmp_path / "model", kind))}
    )
    config.tune.mode, config.data.length, config.model.read_layers = mode, 16, 2
    model = classifier.build(config)
    train, _ = labelled_texts.load(config)
    tokens, mask = train.take(slice(5)).tokens(model.tokenizer, model.length)
    found = classifier.frozen_features(model, tokens, mask)
    np.testing.assert_allclose(np.square(found).mean(1), 1, rtol=1e-5)
    text = (found,) if mode == "probe" else (tokens, mask)
    trained = {
        **model.trained,
        "weights": jax.random.normal(jax.random.key(0), (found.shape[1], 2)),
    }
    logits = classifier.PrivateClassifier(model, trained).logits(*text)
    np.testing.assert_allclose(logits, found @ trained["weights"], rtol=1e-4, atol=1e-4)
    sizes = [x.size for x in jax.tree.leaves(model.trained)]
    assert {"probe": len(sizes) == 2, "lora": len(sizes) > 2, "full": len(sizes) > 10}[mode]


@pytest.mark.slow
def test_an_encoder_as_wide_as_a_microbatch_is_not_taken_for_examples(tmp_path, recwarn):
    rows = [f"text {i},{'yes' if i % 2 else 'no'},a" for i in range(200)]
    config = table(tmp_path, rows)
    config.non_private.steps, config.model.dim = 0, config.train.microbatch_size
    run.prepare(config, "classify:table,tiny", tmp_path / "run")
    run.execute(config, tmp_path / "run")
    assert not [str(w.message) for w in recwarn if "closes over" in str(w.message)]
