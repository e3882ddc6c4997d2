"""Folders that cannot be used: each is named in one line, and none is read as another model."""

import json
import shutil

import folders
import numpy as np
import pytest

from dpx.nn import lora, peft, pretrained

pytest.importorskip("safetensors")
tokenizers = pytest.importorskip("tokenizers")


def refused(path, words, call=pretrained.load):
    with pytest.raises(ValueError, match=words) as raised:
        call(path)
    assert len(str(raised.value).splitlines()) == 1


YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
CONFIGS = {
    "llama": [
        ({"model_type": "mamba"}, "model_type='mamba', which must be one of llama, mistral"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\], which must be one of llama"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\], which must be one of silu"),
        ({"architectures": ["LlamaModel"]}, "architectures=.*must be one of LlamaForCausalLM"),
        ({"architectures": None}, "architectures=None"),
        ({"residual_multiplier": 0.5}, "residual_multiplier=0.5, which is not a setting"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*is not a setting"),
        ({"auto_map": {"AutoModel": "m.py"}}, "auto_map=.*is not a setting"),
        ({"hidden_act": "mish"}, "hidden_act='mish', which must be one of silu"),
        ({"rope_parameters": YARN}, "rope_type='yarn', which must be default, linear or llama3"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5, which must be 1.0",
        ),
        ({"rope_parameters": {"rope_type": "llama3"}}, "must hold 'factor'"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "rope_type='yarn'"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True, which must be False"),
        ({"attention_bias": True}, r"must hold the array 'layers.0.self_attn.\w_proj.bias'"),
        ({"num_hidden_layers": 1}, "has 9 arrays that are not supported"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0, which must be one number"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True, which must be one number"),
        ({"num_hidden_layers": 10**6}, "must hold 1000000 layers by its settings, and holds"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000, which must be one"),
        ({"num_attention_heads": 3}, "num_kv_heads=2 must divide num_heads=3"),
        ({"vocab_size": 41}, r"embed_tokens.weight of shape \(40, 16\), which must be \(41, 16\)"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no', which must be true or false"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None, which must be a positive"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0, which must be a positive"),
    ],
    "gemma3": [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, which is not"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"layer_types": ["full_attention"]}, "layer_types=.*must be 2 times"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types=.*must be 2"),
        ({"layer_types": ["full_attention", ["full_attention"]]}, "layer_types=.*must be 2"),
    ],
    "gpt2": [
        ({"scale_attn_by_inverse_layer_idx": True}, "by_inverse_layer_idx=True, which must be False"),
        ({"n_positions": None}, "n_positions=None"),
    ],
    "bert": [
        ({"position_embedding_type": "relative_key"}, "relative_key', which must be 'absolute'"),
        ({"is_decoder": True}, "is_decoder=True, which must be False"),
        ({"architectures": ["BertForTokenClassification"]}, "architectures=.*BertForMaskedLM"),
        ({"architectures": ["BertForSequenceClassification"]}, "must hold the array 'classifier"),
    ],
    "bert_classifier": [
        ({"architectures": ["BertModel"]}, "2 arrays that are not supported, classifier.bias"),
        ({"id2label": 3}, "id2label=3, which must be names by number"),
        ({"id2label": {"0": "a"}}, r"classifier.weight of shape \(3, 16\), which must be \(1, 16\)"),
    ],
    "roberta": [({"pad_token_id": None}, "pad_token_id=None")],
    "qwen2_windows": [
        ({"layer_types": None, "max_window_layers": None}, "max_window_layers=None"),
        ({"max_window_layers": "1"}, "max_window_layers='1'"),
    ],
}  # fmt: skip
CASES = [(name, change, words) for name, rows in CONFIGS.items() for change, words in rows]


@pytest.mark.parametrize(("name", "change", "words"), CASES)
def test_settings_that_make_another_model_are_named(tmp_path, name, change, words):
    refused(folders.changed(tmp_path / "model", name, config=change), words)


def test_no_setting_is_read_and_passed_over(tmp_path):
    """Any key that is new, with any value but none at all."""
    for name in (*folders.ENCODERS, *folders.DECODERS):
        folder = folders.changed(tmp_path / name, name, config={"new_feature": False})
        refused(folder, "new_feature=False, which is not a setting that is known")
        path = folder / "config.json"
        path.write_text(path.read_text().replace("false", "null"))


NORM = "model.norm.weight"
ARRAYS = [
    ({"model.layers.1.mlp.up_proj.weight": None}, "'layers.1.mlp.up_proj.weight'"),
    ({"model.layers.0.mlp.up_proj.bias": np.ones(20, "f4")}, "1 arrays that are not"),
    ({"norm.weight": np.ones(16, "f4")}, "norm.weight a second time, by an older"),
    ({NORM: np.ones(5, "f4")}, r"norm.weight of shape \(5,\)"),
    ({NORM: np.full(16, np.inf, "f4")}, "norm.weight with numbers"),
    ({NORM: np.ones(16, "i1")}, "norm.weight as I8, which must be"),
]


@pytest.mark.parametrize(("changes", "words"), ARRAYS)
def test_arrays_that_make_another_model_are_named(tmp_path, changes, words):
    def changed(arrays):
        return {k: v for k, v in (arrays | changes).items() if v is not None}

    refused(folders.changed(tmp_path / "model", "llama", arrays=changed), words)


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_head_of_its_own_beside_a_tie_is_named(tmp_path, name):
    """`transformers` uses such a head, whatever the settings say."""
    arrays = {"lm_head.weight": np.ones((40, 16), "f4")}
    folder = folders.changed(tmp_path / "model", name, arrays=lambda own: own | arrays)
    refused(folder, "holds lm_head.weight, which must be the table of tokens")


def test_files_that_are_missing_or_cut_off_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        pretrained.load(tmp_path / "absent")
    refused(tmp_path, "must hold config.json of a model")
    refused(folders.HERE / "llama_lora", "holds adapters: load their model")
    folder = folders.changed(tmp_path / "llama", "llama")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:size])
        refused(folder, r"model\.safetensors must be a whole file .*cut off")
    weights.unlink()
    refused(folder, "must hold model.safetensors, and does not: check the path")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, "pytorch_model.bin is a pickle, which is not read")
    (folder / "config.json").write_text('{"model_type": "llama"')
    refused(folder, "config.json must be JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "config.json must hold settings by name")


def test_shards_that_are_missing_are_named(tmp_path):
    folder = folders.sharded(tmp_path / "model", "llama")
    index, second = folder / "model.safetensors.index.json", "model-00002-of-00002.safetensors"
    (folder / second).rename(tmp_path / second)
    refused(folder, rf"{second} is missing")
    shutil.copy(folder / second.replace("2-", "1-", 1), folder / second)
    refused(folder, rf"{second} must hold the arrays that model.safetensors.index.json names")
    placed = json.loads(index.read_text())
    shutil.copy(tmp_path / second, folder / second)
    extra = {k: v for k, v in placed["weight_map"].items() if k != "lm_head.weight"}
    index.write_text(json.dumps({"weight_map": extra}))
    refused(
        folder,
        "must hold the arrays that model.safetensors.index.json names, .* for lm_head.weight",
    )
    placed["weight_map"]["lm_head.weight"] = "../model.safetensors"
    index.write_text(json.dumps(placed))
    refused(folder, "names '../model.safetensors', which must be a file beside it")
    index.write_text("{}")
    refused(folder, "must hold weight_map")


def word_level(size):
    words = {f"w{number}": number for number in range(size)}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))


def test_the_tokenizer_of_another_model_is_refused(tmp_path):
    folder = folders.changed(tmp_path / "model", "llama")
    refused(folder, "tokenizer.json is missing", pretrained.tokenizer)
    word_level(41).save(str(folder / "tokenizer.json"))
    words = "has token 40, and the model 40 tokens: it is the tokenizer of another model"
    refused(folder, words, pretrained.tokenizer)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    refused(folder, "must be a tokenizer, and is not", pretrained.tokenizer)


def test_a_tokenizer_reads_names_of_control_tokens_as_text(tmp_path):
    """A document that writes <|endoftext|> ends nothing."""
    folder = folders.changed(tmp_path / "model", "gpt2", config={"bos_token_id": 3})
    letters = {letter: number for number, letter in enumerate("<|endoftx>ab")}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    built.add_special_tokens(["<|endoftext|>"])
    built.save(str(folder / "tokenizer.json"))
    found = pretrained.tokenizer(folder)
    assert found.start == 12
    (ids,) = found.encode(["a<|endoftext|>"])
    assert 12 not in ids
    assert len(ids) == 14


@pytest.mark.parametrize(
    ("first", "last", "start"),
    [(50256, 3, 3), ([], -1, None), ([40, 2], [39], 39), (True, 1.0, None)],
)
def test_a_token_that_the_model_has_not_begins_no_text(tmp_path, first, last, start):
    config = {"bos_token_id": first, "eos_token_id": last}
    folder = folders.with_letters(tmp_path / "model", config=config)
    assert pretrained.tokenizer(folder).start == start


def test_an_encoder_is_given_its_marks_within_the_length(tmp_path):
    folder = folders.changed(tmp_path / "model", "bert")
    built = word_level(40)
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    marks = [("w1", 1), ("w2", 2)]
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="w1 $A w2", special_tokens=marks
    )
    built.enable_padding(length=16)
    built.enable_truncation(4)
    built.save(str(folder / "tokenizer.json"))
    found = pretrained.tokenizer(folder)
    (ids,) = found.encode(["w7 w8 w9 w10"])
    assert ids.tolist() == [1, 7, 8, 9, 10, 2]
    (ids,) = found.encode(["w7 w8 w9 w10"], length=4)
    assert ids.tolist() == [1, 7, 8, 2]
    assert found.encode(["w7 w8"], length=1)[0].tolist() == [1]
    tokens, mask = pretrained.padded([ids, ids[:2]])
    assert tokens.tolist() == [[1, 7, 8, 2], [1, 7, 0, 0]]
    assert mask.tolist() == [[True] * 4, [True, True, False, False]]


ADAPTERS = [
    ({"peft_type": "IA3"}, "peft_type='IA3', which must be LORA"),
    ({"use_dora": True}, "use_dora=True, which must be False"),
    ({"bias": "all"}, "bias='all', which must be 'none'"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern=.*is not a setting"),
    ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern=.*is not a setting"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*is not a setting"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which may change the model"),
    ({"lora_bias": True}, "lora_bias=True, which must be False"),
    ({"r": 3}, r"of shape \(2, 20\), which must be \(3, 20\)"),
    ({"r": 0}, "r=0, which must be one number from 1 to"),
    ({"new_feature": 1}, "new_feature=1, which is not a setting"),
]


@pytest.mark.parametrize(("change", "words"), ADAPTERS)
def test_adapters_that_cannot_be_used_are_named(tmp_path, change, words):
    folder = tmp_path / "adapters"
    shutil.copytree(folders.HERE / "llama_lora", folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    model = pretrained.load(folders.HERE / "llama")
    refused(folder, words, lambda folder: peft.load(model, folder))
    assert not model.adapters


def test_adapters_of_another_model_are_named(tmp_path):
    other = pretrained.load(folders.HERE / "gpt2")
    words = "which is no adapter of a layer of this model"
    refused(folders.HERE / "llama_lora", words, lambda folder: peft.load(other, folder))
    refused(tmp_path, "must hold adapter_config.json", lambda folder: peft.load(other, folder))
    refused(tmp_path, "has no adapters", lambda folder: peft.save(other, folder, base="x"))
    folder = tmp_path / "half"
    shutil.copytree(folders.HERE / "llama_lora", folder)
    stored = folders.load_file(folder / peft.WEIGHTS)
    stored.pop(next(name for name in stored if "lora_B" in name))
    folders.save_file(stored, folder / peft.WEIGHTS)
    model = pretrained.load(folders.HERE / "llama")
    refused(folder, "must hold both factors", lambda folder: peft.load(model, folder))
    lora.attach(model)
    refused(folder, "model has adapters", lambda folder: peft.load(model, folder))
