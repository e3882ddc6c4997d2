"""Folders of Hugging Face: outputs are those of `transformers` and `peft`, and clipping is exact."""

import dataclasses
import functools
import json
import warnings

import folders
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import dpx
from dpx.nn import lora, peft, pretrained
from dpx.nn.pretrained import Encoder

pytest.importorskip("safetensors")
ALL = (*folders.ENCODERS, *folders.CLASSIFIERS, *folders.DECODERS)


def outputs(model, tokens, mask):
    """One text at a time, as the models are meant to be called."""
    run = jax.jit(lambda tokens, mask: model(tokens, mask=mask))
    return np.stack([run(*text) for text in zip(tokens, mask, strict=True)])


def compared(name, found, mask):
    """What of the outputs has to be the same.

    A query that is padding sees nothing real within a window. Its output, which nobody looks at, is then a
    mean of all values in `transformers`, and of none here.
    """
    return found[mask] if name in folders.WINDOWED else found


@pytest.mark.quick_cases("gpt2")
@pytest.mark.parametrize("name", ALL)
def test_outputs_are_those_of_transformers(name):
    tokens, mask, expected = folders.reference(name)
    model = pretrained.load(folders.HERE / name)
    for found in (outputs(model, tokens, mask), np.asarray(model(tokens, mask))):
        assert found.shape == expected.shape
        np.testing.assert_allclose(
            compared(name, found, mask), compared(name, expected, mask), atol=2e-5
        )
    alone = model(tokens[1][mask[1]])
    padded = found[1] if name in folders.CLASSIFIERS else found[1][mask[1]]
    np.testing.assert_allclose(alone, padded, atol=2e-5)


def end(model, x):
    """What a model returns after its last layer: a decoder that has a shift alone begins behind it."""
    if isinstance(model, Encoder):
        return x
    model.shift = nnx.LoRAParam(jnp.zeros(model.settings.dim))
    return model.logits(x)


@pytest.mark.quick_cases("bert", "gemma3")
@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "llama", "qwen2_windows", "gemma3"])
def test_states_of_several_layers_are_those_of_models_that_end_there(name):
    tokens, mask, _ = folders.reference(name)
    model, plain = (pretrained.load(folders.HERE / name) for _ in range(2))
    lora.attach(model, target_modules="all-linear", rank=2, layers=1)
    second = model.adapters["up"]["second"]
    second[...] = jax.random.normal(jax.random.key(0), second.shape)
    count = model.settings.num_layers
    found = model.states(tokens, mask, last=count)
    np.testing.assert_allclose(end(plain, found[-1]), model(tokens, mask), atol=1e-5)
    for start in range(1, count):  # the last of which is the first with adapters
        trunk = model.trunk(tokens, mask, stop=start)
        later = model.states(trunk, mask, last=count - start + 1, start=start)
        for x, expected in zip(later, found[start - 1 :], strict=True):
            np.testing.assert_allclose(x, expected, atol=1e-5)
        with pytest.raises(ValueError, match=f"must be from 1 to {count - start + 1}: "):
            model.states(trunk, mask, last=count - start + 2, start=start)
    for stop in range(1, count):  # of which none has adapters
        windows = getattr(plain.settings, "windows", None)
        cut = {} if windows is None else {"windows": windows[:stop]}
        settings = dataclasses.replace(plain.settings, num_layers=stop, **cut)
        short = type(plain)(settings, rngs=nnx.Rngs(0))
        for part, value, stacked in plain.own():
            if stacked:
                short.layers[part][...] = value[...][:stop]
            else:
                getattr(short, part)[...] = value[...]
        expected = short(tokens, mask)
        np.testing.assert_allclose(end(short, found[stop - 1]), expected, atol=1e-5)
    with pytest.raises(ValueError, match=f"last={count + 1} must be from 1 to {count}"):
        plain.states(tokens, last=count + 1)


def stored_as(kind):
    return lambda arrays: {name: array.astype(kind) for name, array in arrays.items()}


@pytest.mark.quick_cases
@pytest.mark.parametrize("name", ["distilbert", "qwen3"])
@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_narrow_weights_are_read_as_they_are(tmp_path, name, kind):
    narrow = folders.changed(tmp_path / "narrow", name, arrays=stored_as(kind))

    def rounded(arrays):
        return {k: v.astype(kind).astype(np.float32) for k, v in arrays.items()}

    wide = folders.changed(tmp_path / "wide", name, arrays=rounded)
    tokens, mask, expected = folders.reference(name)
    found = pretrained.load(narrow)(tokens, mask)
    np.testing.assert_array_equal(found, pretrained.load(wide)(tokens, mask))
    assert 1e-5 < np.abs(found - expected).max() < 0.1
    kept = pretrained.load(narrow, param_dtype=kind)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(kept))} == {jnp.dtype(kind)}


def test_shards_are_one_model(tmp_path):
    tokens, mask, expected = folders.reference("llama")
    model = pretrained.load(folders.sharded(tmp_path / "model", "llama"))
    np.testing.assert_allclose(model(tokens, mask), expected, atol=2e-5)


def without_prefix(prefix):
    return lambda arrays: {k.removeprefix(prefix): v for k, v in arrays.items()}


def older_bert(arrays):
    """As the first BERT was saved: with heads, other names in norms, and a table that counts positions."""
    names = {
        "bert." + k.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): v
        for k, v in arrays.items()
    }
    return names | {
        "cls.predictions.bias": np.ones(40, "f4"),
        "bert.embeddings.position_ids": np.ones(16, "f4"),
    }


OLDER = {
    "rotary positions by two keys": (
        "llama3_rope",
        {
            "rope_theta": 500.0,
            "rope_scaling": {
                "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        ("rope_parameters", "head_dim"),
        None,
    ),
    "settings that change nothing": (
        "llama",
        {
            "is_llama_config": True, "rope_interleaved": False, "use_mrope": False, "torch_dtype": "bfloat16",
            "rope_theta": 5.0, "transformers.js_config": {"a": 1}, "max_length": 20, "eos_token_id": [1, 2],
        },
        ("dtype",),
        None,
    ),
    "settings of the first BERT": (
        "bert",
        {"directionality": "bidi", "pooler_fc_size": 768, "pooler_type": "first_token_transform"},
        ("tie_word_embeddings", "is_decoder", "add_cross_attention"),
        None,
    ),
    "windows by a pattern": (
        "gemma3",
        {
            "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None,
            "sliding_window_pattern": 2, "_sliding_window_pattern": 6,
        },
        ("rope_parameters", "layer_types"),
        None,
    ),
    "windows from a layer on": ("qwen2_windows", {}, ("layer_types",), None),
    "a GPT-2 without a prefix, with its masks": (
        "gpt2",
        {"n_ctx": 16},
        (),
        lambda arrays: without_prefix("transformer.")(arrays) | {"h.0.attn.bias": np.ones((16, 16), "f4")},
    ),
    "a BERT with its heads": ("bert", {"architectures": ["BertForMaskedLM"]}, (), older_bert),
    "a head that is tied": (
        "qwen2", {}, (), lambda arrays: arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    ),
}  # fmt: skip


@pytest.mark.quick_cases("a GPT-2 without a prefix, with its masks", "a head that is tied")
@pytest.mark.parametrize("case", OLDER)
def test_older_files_are_the_same_models(tmp_path, case):
    name, config, left_out, arrays = OLDER[case]
    folder = folders.changed(
        tmp_path / "model", name, config=config, left_out=left_out, arrays=arrays
    )
    tokens, mask, expected = folders.reference(name)
    found = np.asarray(pretrained.load(folder)(tokens, mask))
    np.testing.assert_allclose(
        compared(name, found, mask), compared(name, expected, mask), atol=2e-5
    )


def linear_scaling(factor, **more):
    return {"rope_type": "linear", "factor": factor, "rope_theta": 10000.0} | more


@pytest.mark.slow
def test_a_stretched_model_sees_positions_nearer(tmp_path):
    """Linear scaling by 2 puts a token at 2i where it was at i; there is none between in this text."""
    folder = folders.changed(
        tmp_path / "model", "llama", config={"rope_parameters": linear_scaling(2.0)}
    )
    near, far = pretrained.load(folders.HERE / "llama"), pretrained.load(folder)
    tokens = np.arange(3, 8)
    spread = np.full(9, 30)
    spread[::2] = tokens
    seen = np.arange(9) % 2 == 0
    np.testing.assert_allclose(far(spread, seen)[::2], near(tokens), atol=2e-5)


def loss_of(outputs):
    """A loss of what `outputs` makes of parameters, tokens and mask."""

    def loss(params, tokens, mask):
        out = outputs(params, tokens, mask)
        if isinstance(out, list):
            out = sum(x[mask.argmax()] * (n + 1) for n, x in enumerate(out))
        elif out.ndim == 2 and out.shape[-1] == 40:
            each = optax.softmax_cross_entropy_with_integer_labels(out[:-1], tokens[1:])
            return jnp.where(mask[1:], each, 0).sum()
        elif out.ndim == 2:
            out = jnp.where(mask[:, None], out, 0).sum(0)
        return jax.nn.logsumexp(out) - out[0]

    return loss


def check_clipping(loss, params, name):
    """The clipped sum is that of `jax.vmap(jax.grad)`, clipped by hand; no block is held for an example."""
    tokens, mask, _ = folders.reference(name)
    tokens, mask = np.concatenate([tokens, tokens[::-1] // 2 + 3]), np.concatenate([mask, mask])
    each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, tokens, mask)
    rows = np.concatenate([np.reshape(x, (4, -1)) for x in jax.tree.leaves(each)], axis=1)
    norms = np.linalg.norm(rows, axis=1)
    bound = float(np.median(norms))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # every parameter has a rule
        clipped = jax.jit(dpx.clipped_grad(loss, l2_clip_norm=bound, strict=True))
        found = clipped(params, tokens, mask)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-4)
    expected = (rows * np.minimum(1, bound / norms)[:, None]).sum(0)
    mine = np.concatenate([np.ravel(x) for x in jax.tree.leaves(found.grads)])
    assert np.linalg.norm(mine - expected) < 2e-5 * np.linalg.norm(expected)


FROZEN = {"frozen": True}
TWO = {"target_modules": ("q_proj", "down_proj"), "rank": 2}
LAST = {"rank": 2, "layers": 1, "rslora": True}
# The folder of a model, how it is loaded, and its adapters, which alone are trained if there are any.
CLIPPED = {name: (name, {}, None) for name in ALL} | {
    "remat": ("llama", {"remat": True}, None),
    "adapters": ("llama", {}, TWO),
    "adapters, remat": ("llama", {"remat": True}, LAST),
    "second factors of one layer": ("llama", {}, LAST | {"train_first": False}),
    "adapters on constants, unrolled": ("llama", FROZEN | {"unroll": True}, TWO | {"shift": True}),
    "adapters of Llama": ("llama", FROZEN, TWO | LAST),
    "adapters of GPT-2": ("gpt2", FROZEN, LAST | {"target_modules": ("c_attn", "mlp.c_proj")}),
    "adapters of Gemma": ("gemma3", FROZEN, LAST | {"target_modules": "all-linear"}),
    "adapters of BERT": ("bert", FROZEN, LAST | {"target_modules": ("query", "attention.output.dense")}),
    "adapters of DistilBERT": ("distilbert_classifier", FROZEN, LAST | {"target_modules": ("q_lin", "lin2")}),
    "states of BERT": ("bert", FROZEN, {"target_modules": "all-linear", "rank": 2}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CLIPPED)
def test_clipped_gradients_are_those_of_each_example(case):
    name, ways, adapters = CLIPPED[case]
    model = pretrained.load(folders.HERE / name, **ways)
    frozen = nnx.State({})
    if adapters is None:
        graph, params = nnx.split(model)
    else:
        tokens, mask, _ = folders.reference(name)
        before = np.asarray(model(tokens, mask))
        lora.attach(model, **adapters)
        np.testing.assert_allclose(model(tokens, mask), before, atol=1e-6)
        graph, params, frozen = nnx.split(model, nnx.LoRAParam, ...)
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype("f4"), params)

    def outputs(params, tokens, mask):
        model = nnx.merge(graph, params, frozen)
        return model.states(tokens, mask, last=2) if "states" in case else model(tokens, mask)

    check_clipping(loss_of(outputs), params, name)


def test_modules_are_chosen_as_peft_chooses():
    model = pretrained.load(folders.HERE / "gpt2")
    chosen = functools.partial(lora.chosen, model)
    assert set(chosen(("c_proj",))) == {"out", "down"}
    assert set(chosen(("mlp.c_proj", "c_attn"))) == {"qkv", "down"}
    for every in ("all-linear", ("all-linear",)):
        assert set(chosen(every)) == {"qkv", "out", "up", "down"}
    bert = pretrained.load(folders.HERE / "bert")
    assert set(lora.chosen(bert, ["output.dense"])) == {"out", "down"}
    assert lora.chosen(bert, ["attention.output.dense"]) == ("out",)
    with pytest.raises(
        ValueError, match=r"target_modules=\('proj',\) must be .* attn.c_attn, attn"
    ):
        chosen(("proj",))


@pytest.mark.quick_cases("gpt2_lora")
@pytest.mark.parametrize("name", ["llama_lora", "gpt2_lora"])
def test_adapters_of_peft_are_read_and_written(tmp_path, name):
    tokens, mask, expected = folders.reference(name)
    base = folders.HERE / name.removesuffix("_lora")
    model = pretrained.load(base)
    assert np.abs(model(tokens, mask) - expected).max() > 0.1
    peft.load(model, folders.HERE / name)
    np.testing.assert_allclose(model(tokens, mask), expected, atol=2e-5)
    peft.save(model, tmp_path, base="model")
    stored = [folders.load_file(path / peft.WEIGHTS) for path in (folders.HERE / name, tmp_path)]
    assert stored[0].keys() == stored[1].keys()
    for array, own in stored[0].items():
        np.testing.assert_array_equal(stored[1][array], own)
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == "model"
    again = pretrained.load(base)
    peft.load(again, tmp_path)
    np.testing.assert_array_equal(again(tokens, mask), model(tokens, mask))


def test_the_modules_that_are_written_are_matched_in_full(tmp_path):
    """`peft` matches a text against the whole name of each module."""
    import re

    model = pretrained.load(folders.HERE / "llama")
    lora.attach(model, target_modules=("o_proj",), rank=3, alpha=6.0, layers=1, shift=True)
    model.shift = nnx.LoRAParam(jnp.arange(16.0))
    peft.save(model, tmp_path, base="model")
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    stored = folders.load_file(tmp_path / peft.WEIGHTS)
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in stored}
    assert modules == {"model.layers.1.self_attn.o_proj", "lm_head"}
    assert all(re.fullmatch(config["target_modules"], module) for module in modules)
    assert not re.fullmatch(config["target_modules"], "model.layers.0.self_attn.o_proj")
    assert config["lora_alpha"] / config["r"] == 2.0
    bias = 2.0 * stored["base_model.model.lm_head.lora_B.bias"]
    tokens, mask, expected = folders.reference("llama")
    np.testing.assert_allclose(model(tokens, mask), expected + bias, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "task"),
    [("bert_classifier", None), ("bert", "FEATURE_EXTRACTION"), ("gpt2", "CAUSAL_LM")],
)
def test_adapters_are_saved_for_a_task_that_takes_adapters_alone(tmp_path, name, task):
    """Of SEQ_CLS, `peft` opens no file without the arrays of the head."""
    model = pretrained.load(folders.HERE / name)
    lora.attach(model, target_modules="all-linear", rank=2)
    peft.save(model, tmp_path, base="model")
    assert json.loads((tmp_path / peft.CONFIG).read_text())["task_type"] == task
    peft.load(pretrained.load(folders.HERE / name), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta", "gpt2"])
def test_texts_beyond_the_context_are_refused(name):
    model = pretrained.load(folders.HERE / name)
    assert len(model(jnp.full(16, 5))) == 16
    for call in (model, jax.jit(lambda tokens: model(tokens))):
        with pytest.raises(ValueError, match=r"shape \(17,\) must be at most 16 in a text"):
            call(jnp.full(17, 5))


@pytest.mark.slow
def test_an_encoder_has_no_shift():
    with pytest.raises(ValueError, match="shift=True must be False for an encoder"):
        lora.attach(pretrained.load(folders.HERE / "bert"), target_modules="query", shift=True)
