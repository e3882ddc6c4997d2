"""GGUF files: what is written is read, models are what they were, and wrong files are named in one line."""

import functools
import sys

import jax
import jax.numpy as jnp
import llama_reference
import numpy as np
import pytest
from flax import nnx

from dpx.nn import lora, pretrained
from dpx.nn.pretrained import gguf

gguf_package = pytest.importorskip("gguf")

HEADS, KV_HEADS, DIM, HIDDEN, LAYERS, SIZE = 4, 2, 32, 64, 2, 8
# Bytes as byte-level BPE writes them, of which some are merged.
LETTERS = ["Ġ", "Ċ", "'", ",", *"abcdefghijklmnopqrstuvwxyz0123456789é", "Ã", "©"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]
VOCABULARY = ["<|endoftext|>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]


def arrays(seed=0):
    """Matrices (out, in), as GGUF files have them."""
    rng = np.random.default_rng(seed)
    shapes = {"token_embd": (len(VOCABULARY), DIM), "output_norm": (DIM,)}
    layer = {
        "attn_q": (HEADS * SIZE, DIM), "attn_k": (KV_HEADS * SIZE, DIM), "attn_v": (KV_HEADS * SIZE, DIM),
        "attn_output": (DIM, HEADS * SIZE), "ffn_gate": (HIDDEN, DIM), "ffn_up": (HIDDEN, DIM),
        "ffn_down": (DIM, HIDDEN), "attn_norm": (DIM,), "ffn_norm": (DIM,),
    }  # fmt: skip
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {
        f"{name}.weight": rng.normal(size=shape, scale=0.3).astype("f4")
        for name, shape in shapes.items()
    }


def write(path, *, family="llama", changes=(), left_out=(), quantised=None, more=(), pre="smollm"):
    """Writes a model; without `pre`, a tokenizer that does not say how it cuts words, or with False none."""
    writer = gguf_package.GGUFWriter(path, family)
    settings = {
        "vocab_size": len(VOCABULARY), "embedding_length": DIM, "block_count": LAYERS, "head_count": HEADS,
        "head_count_kv": KV_HEADS, "feed_forward_length": HIDDEN, "rope_freq_base": 500.0,
        "layer_norm_rms_eps": 1e-5,
    }  # fmt: skip
    if pre is not False:
        tokenizer = {"model": "gpt2", "pre": pre}
        settings |= {f"tokenizer_{k}": v for k, v in tokenizer.items() if v is not None}
        settings |= {"token_list": VOCABULARY, "token_merges": MERGES, "bos_token_id": 1}
    for name, value in (settings | dict(changes)).items():
        getattr(writer, f"add_{name}")(value)
    kind = None if quantised is None else gguf_package.GGMLQuantizationType[quantised]
    for name, array in (arrays() | dict(more)).items():
        if name in left_out:
            continue
        if kind is None or array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf_package.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


HEAD = {"output.weight": np.random.default_rng(1).normal(size=(len(VOCABULARY), DIM)).astype("f4")}
STRETCHED = {"rope_freqs.weight": np.array([1, 2, 4, 8], "f4")}


@pytest.mark.quick_cases("untied, stretched")
@pytest.mark.parametrize("more", [{}, HEAD | STRETCHED], ids=["tied", "untied, stretched"])
def test_the_model_is_the_slow_one_with_interleaved_positions(tmp_path, more):
    """The order of pairs differs between the file and the module, and it shows nowhere."""
    model = pretrained.load(write(tmp_path / "model.gguf", more=more))
    found = arrays() | more
    ours = {k: v for k, v in gguf.GGUF_MODULES.items() if v.startswith("blk")}
    weights = {
        "embed": found["token_embd.weight"],
        "norm": found["output_norm.weight"],
        "head": found.get("output.weight", found["token_embd.weight"]).T,
        "layers": [
            {name: found[f"{place.format(i)}.weight"].T for name, place in ours.items()}
            for i in range(LAYERS)
        ],
    }
    tokens = np.random.default_rng(0).integers(0, len(VOCABULARY), 6)
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "theta": 500.0, "epsilon": 1e-5}
    factors = more.get("rope_freqs.weight")
    expected = llama_reference.logits(tokens, weights, factors=factors, **shape)
    found = model(jnp.asarray(tokens))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 1e-3), ("Q8_0", 0.02), ("Q4_0", 0.2)])
def test_quantised_arrays_are_near(tmp_path, kind, tolerance):
    file = gguf.GGUF(write(tmp_path / "model.gguf", quantised=kind))
    exact = arrays()["blk.1.ffn_up.weight"]
    found = file.array("blk.1.ffn_up.weight")
    assert found.dtype == np.float32
    assert 0 < np.abs(found - exact).max() < tolerance * np.abs(exact).max()


def test_the_tokenizer_cuts_digits_and_merges_within_words(tmp_path):
    tokenizer = pretrained.tokenizer(write(tmp_path / "model.gguf"))
    assert tokenizer.vocab_size == len(VOCABULARY)
    assert tokenizer.start == 0
    (ids,) = tokenizer.encode(["the the 12\n"])
    assert ids.dtype == np.int32
    # "12" is a merge, but digits stand alone; a blank before a digit is a word of its own.
    assert [VOCABULARY[i] for i in ids] == ["t", "he", "Ġthe", "Ġ", "1", "2", "Ċ"]
    assert tokenizer.decode(ids) == "the the 12\n"
    (ids,) = tokenizer.encode(["é"])
    assert [VOCABULARY[i] for i in ids] == ["Ã", "©"]
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    for name in ("gpt-2", "llama-bpe"):  # which keep digits together
        tokenizer = pretrained.tokenizer(write(tmp_path / "model.gguf", pre=name))
        (ids,) = tokenizer.encode([" the 12\n"])
        assert [VOCABULARY[i] for i in ids] == ["Ġthe", "Ġ", "12", "Ċ"]


@pytest.mark.quick_cases
@pytest.mark.parametrize("more", [{}, HEAD])
def test_a_tuned_model_becomes_a_folder(tmp_path, more):
    """Adapters merged; in the file pairs lie side by side, and in the folder in two halves."""
    pytest.importorskip("safetensors")
    path = write(tmp_path / "model.gguf", more=more, changes={"context_length": 16})
    model = pretrained.load(path)
    before = model(jnp.arange(6))
    lora.attach(model, target_modules="all-linear", rank=2, layers=1)
    for pair in model.adapters.values():
        pair["second"] = nnx.LoRAParam(jnp.full(pair["second"].shape, 0.1))
    source = pretrained.open_checkpoint(path)
    pretrained.save(model, tmp_path / "folder", source=source)
    found = pretrained.load(tmp_path / "folder")
    assert found.settings == model.settings
    np.testing.assert_allclose(found(jnp.arange(6)), model(jnp.arange(6)), atol=1e-4)
    assert np.abs(found(jnp.arange(6)) - before).max() > 0.1
    tokenizers = [source.tokenizer(), pretrained.tokenizer(tmp_path / "folder")]
    texts = ["the the 12\né", "<|endoftext|>"]
    for mine, theirs in zip(*(tokenizer.encode(texts) for tokenizer in tokenizers), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert tokenizers[0].start == tokenizers[1].start


def refused(words, call, *given, error=ValueError, **named):
    with pytest.raises(error, match=words) as raised:
        call(*given, **named)
    assert len(str(raised.value).splitlines()) == 1


def test_wrong_files_are_named_in_one_line(tmp_path, monkeypatch):
    refused(
        r"absent\.gguf: no such file", gguf.GGUF, tmp_path / "absent.gguf", error=FileNotFoundError
    )
    (tmp_path / "other").write_text("no model at all")
    refused("must be a GGUF file", gguf.GGUF, tmp_path / "other")
    whole = write(tmp_path / "whole.gguf").read_bytes()
    assert len(whole) > 20000
    for size in (4, 10, 60, 700, 1500, len(whole) // 2, len(whole) - 40):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        refused(r"cut\.gguf .*cut off", gguf.GGUF, tmp_path / "cut.gguf")
    path = write(tmp_path / "stretched.gguf", more=STRETCHED)
    source, model = pretrained.open_checkpoint(path), pretrained.load(path)
    words = "divides frequencies by numbers of its own"
    refused(words, pretrained.save, model, tmp_path / "folder", source=source)

    class Part(gguf_package.GGUFWriter):
        def add_causal_attention(self, part):
            self.add_uint16("split.no", part)
            self.add_uint16("split.count", 3)

    big = functools.partial(gguf_package.GGUFWriter, endianess=gguf_package.GGUFEndian.BIG)
    for writer, words in (
        (Part, r"is part 2 of 3: join .* --merge"),
        (big, "bytes in the order of this machine"),
    ):
        monkeypatch.setattr(gguf_package, "GGUFWriter", writer)
        refused(words, gguf.GGUF, write(tmp_path / "odd.gguf", changes={"causal_attention": 1}))


def of(name, array):
    return {"more": {f"{name}.weight": array.astype("f4")}}


def changed(name, value):
    return {"changes": {name: value}}


UNUSABLE = [
    ({"family": "qwen2"}, "architecture 'llama', and is 'qwen2'"),
    ({"left_out": ["blk.1.ffn_up.weight"]}, "the array 'blk.1.ffn_up.weight'"),
    (of("output_norm", np.ones(5)), r"shape \(5,\), which must be \(32,\)"),
    (of("blk.0.ffn_gate_inp", np.ones((2, DIM))), "has 1 arrays .*ffn_gate_inp"),
    ({"more": {"blk.0.attn_q.bias": np.ones(DIM, "f4")}}, r"has 1 arrays .* blk\.0\.attn_q\.bias"),
    (of("blk.0.attn_q", np.ones((33, DIM))), r"\(33, 32\), which must be"),
    (of("output_norm", np.full(DIM, np.nan)), "numbers that are not finite"),
    (changed("block_count", 1), "has 9 arrays that are not supported"),
    (changed("rope_dimension_count", 4), "dimension_count=4, which must be 8"),
    (changed("rope_scaling_factor", 4.0), r"scaling\.factor=4\.0, which must be 1"),
    (changed("causal_attention", False), "causal=False, which must be True"),
    (changed("expert_count", 2), "expert_count=2, which must be 0"),
    (changed("logit_scale", 2.0), "logit_scale=2.0, which is not a setting"),
    (changed("head_count", 0), "head_count=0, which must be one number"),
    (changed("head_count_kv", [2, 1]), r"head_count_kv=\[2, 1\], which must be one"),
    (changed("vocab_size", 9), "has 48 tokens and llama.vocab_size=9"),
]
TOKENIZERS = [
    ({"pre": False}, "byte-level BPE tokenizer .* has None"),
    (changed("tokenizer_model", "llama"), "has 'llama'"),
    ({"pre": "deepseek-llm"}, "words as 'deepseek-llm' does"),
    ({"pre": None}, r"has no tokenizer\.ggml\.pre.* --pre-tokenizer, one of gpt-2, smollm"),
    (changed("token_merges", ["q z"]), "merges that do not fit its vocabulary .*`qz`"),
    (changed("token_merges", ["qz"]), "merges that do not fit its vocabulary"),
    (
        {"changes": {"token_list": ["<s>", *VOCABULARY[1:]], "bos_token_id": 9999}},
        "begins texts with token 9999 of 48",
    ),
]


@pytest.mark.parametrize(
    ("load", "settings", "words"),
    [
        *((pretrained.load, *row) for row in UNUSABLE),
        *((pretrained.tokenizer, *row) for row in TOKENIZERS),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, load, settings, words):
    refused(words, load, write(tmp_path / "model.gguf", **settings))


@pytest.mark.parametrize("name", ["gguf", "tokenizers"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name):
    path = write(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, name, None)
    refused(r"pip install -e \"\.\[lm\]", pretrained.tokenizer, path, error=ModuleNotFoundError)


@pytest.mark.parametrize("quantised", [None, "Q8_0"])
def test_a_tuned_model_is_written_as_the_file_it_came_from(tmp_path, quantised):
    source = write(tmp_path / "model.gguf", quantised=quantised)
    model = pretrained.load(source)
    lora.attach(model, target_modules=["q_proj", "k_proj", "down_proj"], rank=2, layers=1)
    rng = np.random.default_rng(0)
    graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    trained = jax.tree.map(lambda x: 0.2 * rng.normal(size=x.shape).astype("f4"), trained)
    model = nnx.merge(graph, trained, frozen)
    pretrained.save_gguf(model, tmp_path / "new.gguf", source=source)
    tokens = jnp.arange(6)
    expected = model(tokens)
    np.testing.assert_allclose(pretrained.load(tmp_path / "new.gguf")(tokens), expected, atol=2e-5)
    assert np.abs(expected - pretrained.load(source)(tokens)).max() > 0.01
    before, after = (gguf_package.GGUFReader(path) for path in (source, tmp_path / "new.gguf"))
    assert {name: field.contents() for name, field in after.fields.items()} == {
        name: field.contents() for name, field in before.fields.items()
    }
    changed = {f"blk.{LAYERS - 1}.{name}.weight" for name in ("attn_q", "attn_k", "ffn_down")}
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert old.name == new.name
        if old.name in changed:
            assert new.tensor_type.name == "F32"
        else:
            assert (new.tensor_type, new.data.tobytes()) == (old.tensor_type, old.data.tobytes())
    text = ["the 12"]
    np.testing.assert_array_equal(
        *(pretrained.tokenizer(path).encode(text) for path in (source, tmp_path / "new.gguf"))
    )
