"""What a run gives away: adapters or a model that open again, a card, and nothing of the training texts."""

import json

import folders
import jax
import numpy as np
import pytest
from all_configs import executed
from command_line import call
from flax import nnx
from test_finetune import SMALL

from dpx.nn import lora, peft, pretrained
from dpx.runs import card, export, records
from experiments.dp_transformer import finetune, tuned_text

tokenizers = pytest.importorskip("tokenizers")
SOURCE = "finetune:tiny"
# Words of the private file; none may be in what is written.
WORDS = ("zebrawood", "quixotry", "jackdaw")
ADAPTERS = {"README.md", peft.CONFIG, peft.WEIGHTS}
MERGED = {"README.md", "config.json", "model.safetensors", "tokenizer.json"}


def finished(folder, **changes):
    """A finished run on private texts of the user, whose path is private too."""
    path = folder / "secretpath.csv"
    lines = [f"{WORDS[i % 3]} {'abcde'[i % 5]} {i},writer{i}" for i in range(60)]
    path.write_text("\n".join(["column0,column1", *lines]) + "\n")
    config = records.load_config(SOURCE)
    settings = {
        "data.path": str(path), "data.generated": 0, "data.column": "column0", "data.length": 6,
        "data.user": "column1", "model.kind": "pretrained", "tune.shift": False, "train.batch_size": 16,
        "train.learning_rate": 0.1, "epsilon": 30.0, "comparisons": True, "ngrams": (1,),
        "non_private.steps": 2, "model.path": str(folders.with_letters(folder / "tinymodel")),
    }  # fmt: skip
    config.update_from_flattened_dict(SMALL | settings | changes)
    return config, executed(config, SOURCE, folder / "run")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    return folder, *finished(folder)


def write(tuned, target, **more):
    folder, _, _ = tuned
    export.write(
        folder / "run", target, **({"form": "adapters", "base": None, "metrics": True} | more)
    )
    return {path.name for path in target.iterdir()}


def logits(config, folder):
    """Of the private model that the run left, for a text."""
    language = tuned_text.build(config)
    private = tuned_text.load(config, folder / "run")
    tokens = np.arange(1, 8)
    found = [language.model(), language.model(private._trained)]
    return tokens, *(np.asarray(model(tokens)) for model in found)


@pytest.mark.slow
def test_adapters_open_on_the_model_that_was_tuned(tuned, tmp_path):
    folder, config, _ = tuned
    assert write(tuned, tmp_path / "to") == ADAPTERS
    tokens, before, after = logits(config, folder)
    assert np.abs(after - before).max() > 1e-3
    model = pretrained.load(folder / "tinymodel")
    peft.load(model, tmp_path / "to")
    np.testing.assert_allclose(model(tokens), after, atol=1e-5)
    stated = json.loads((tmp_path / "to" / peft.CONFIG).read_text())
    assert stated["base_model_name_or_path"] == "tinymodel"


def test_another_model_in_the_place_of_the_one_that_was_tuned_is_refused(tuned, tmp_path):
    folder, _, _ = tuned
    weights = folder / "tinymodel" / "model.safetensors"
    written = weights.read_bytes()
    try:
        weights.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
        with pytest.raises(ValueError, match="files have changed since: put them back"):
            write(tuned, tmp_path / "to")
    finally:
        weights.write_bytes(written)
    assert write(tuned, tmp_path / "to") == ADAPTERS


@pytest.mark.slow
def test_a_merged_model_is_a_folder_of_its_own(tuned, tmp_path):
    folder, config, _ = tuned
    assert write(tuned, tmp_path / "to", form="merged", base="someone/model") == MERGED
    tokens, _, after = logits(config, folder)
    model = pretrained.load(tmp_path / "to")
    np.testing.assert_allclose(model(tokens), after, atol=1e-5)
    both = [
        folders.load_file(path / "model.safetensors")
        for path in (folder / "tinymodel", tmp_path / "to")
    ]
    assert {k: v.shape for k, v in both[0].items()} == {k: v.shape for k, v in both[1].items()}
    words = ["ab c"]
    read = [
        pretrained.tokenizer(path).encode(words) for path in (folder / "tinymodel", tmp_path / "to")
    ]
    np.testing.assert_array_equal(*read)
    assert 'base_model: "someone/model"' in (tmp_path / "to" / "README.md").read_text()


@pytest.mark.parametrize("form", ["adapters", "merged"])
def test_nothing_private_goes_along(tuned, tmp_path, form):
    """Neither texts, nor users, nor what the config says of their file."""
    folder, config, _ = tuned
    write(tuned, tmp_path / "to", form=form)
    private = (*WORDS, "writer1", "secretpath", "column0", "column1", str(folder))
    assert "secretpath" in (folder / "run" / "config.json").read_text()
    for path in (tmp_path / "to").iterdir():
        content = path.read_bytes()
        for word in private:
            for encoding in ("utf-8", "utf-16-le", "utf-32-le"):
                assert word.encode(encoding) not in content, (path, word)
        tokens, _ = pretrained.padded(pretrained.tokenizer(config.model.path).encode([WORDS[0]]))
        for kind in (np.int32, np.int64, np.float32):
            assert tokens.astype(kind).tobytes() not in content, path
    secrets = [path for path in (folder / "run").rglob("*") if "secret" in path.parts]
    assert not [path for path in secrets if path.is_file()]


def test_the_card_says_what_privacy_json_says(tuned, tmp_path):
    _, _, record = tuned
    write(tuned, tmp_path / "to")
    text = (tmp_path / "to" / "README.md").read_text()
    _, metadata, body = text.split("---\n", 2)
    assert "library_name: peft\n" in metadata
    assert 'base_model: "tinymodel"\n' in metadata
    assert "differential-privacy" in metadata
    spent = record.releases["dp_tuned"]
    stated = {"ε": f"{spent['epsilon']:.4g}", "δ": "1e-05", "unit of privacy": "user"}
    stated |= {"neighbouring relation": "add or remove one user", "mechanism": spent["mechanism"]}
    assert "Poisson sampling" in spent["mechanism"]
    lines = [f"| {name} | {value} |" for name, value in stated.items()]
    lines += [f"- **total of all releases**: ε = {record.total['epsilon']:.4g}", "- dp_1gram: ε ="]
    lines += [f"- {x}" for x in (*record.total["assumptions"], *record.private["not_covered"])]
    lines += ["no guarantee covers these numbers", "**tuned privately**", "before tuning"]
    lines += ["DP 1-gram of characters"]
    lines += ["tuned on private records", "Made by dpx"]
    for words in lines:
        assert words in body, words
    assert record.total["epsilon"] > spent["epsilon"]
    # What was made without privacy stays at home, and so does what is compared with it.
    value = record.metrics["tuned/nats_per_token"]
    assert f"{value:.4g}" not in body
    assert "tuned without privacy |" not in body
    assert "share_of_gain" not in body
    assert "## Metrics" not in card.text(record, card.Model("x", "peft"), metrics=False)


def test_a_run_says_whether_tuning_changed_anything(tuned):
    _, _, record = tuned
    assert "Tuning changed what a held-out record costs by at most " in record.notes
    assert "Tuning changed nothing" in finetune._change(np.zeros(3))


def test_a_folder_that_holds_something_is_left_alone(tuned):
    folder, *_ = tuned
    with pytest.raises(ValueError, match="must be a new or an empty folder"):
        write(tuned, folder)


@pytest.mark.slow
def test_the_command_writes_it(tuned, tmp_path):
    folder, *_ = tuned
    ended = call("export", f"--workdir={folder / 'run'}", "--to=new/folder", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"new/folder: {', '.join(sorted(ADAPTERS))}\n"


@pytest.mark.parametrize(
    ("changes", "form", "words"),
    [
        ({"model.kind": "random"}, "adapters", "config.model.kind='random' must be 'pretrained'"),
        ({"tune.shift": True}, "merged", "shift has no place in a merged model"),
        (
            {"tune.mode": "full"},
            "adapters",
            "config.tune.mode='full' changed all parameters: give --merged",
        ),
        ({"tune.shift": False}, "gguf", "must be a GGUF file: save a folder instead"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path, changes, form, words):
    config = records.load_config(SOURCE)
    path = str(folders.with_letters(tmp_path / "model"))
    config.update_from_flattened_dict({"model.kind": "pretrained", "model.path": path} | changes)
    language = tuned_text.build(config)
    model = tuned_text.TunedText(language, language.trained, config)
    with pytest.raises(ValueError, match=words):
        model.export(tmp_path / "to", form=form, base=None)
    assert not list((tmp_path / "to").glob("*"))


@pytest.mark.quick_cases("distilbert_classifier")
@pytest.mark.parametrize("name", ["gpt2", "bert", "distilbert_classifier", "qwen3", "gemma3"])
def test_merging_is_exact_for_every_layout(tmp_path, name):
    """Adapters of the last layer, where matrices are turned or not, and names have a prefix or none."""
    model = pretrained.load(folders.HERE / name)
    tokens, mask, expected = folders.reference(name)
    lora.attach(model, target_modules="all-linear", rank=2, layers=1, shift=name == "gpt2")
    rng = np.random.default_rng(0)
    graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    trained = jax.tree.map(lambda x: 0.2 * rng.normal(size=x.shape).astype("f4"), trained)
    model = nnx.merge(graph, trained, frozen)
    pretrained.save(model, tmp_path, source=folders.HERE / name)
    found = pretrained.load(tmp_path)(tokens, mask)
    np.testing.assert_allclose(found, model(tokens, mask), atol=2e-5)
    assert np.abs(found - expected).max() > 0.01
    both = [
        folders.load_file(path / "model.safetensors") for path in (folders.HERE / name, tmp_path)
    ]
    assert {k: v.shape for k, v in both[0].items()} == {k: v.shape for k, v in both[1].items()}
