"""Language models of Tunix with adapters of Qwix, and of smaller packages."""
# pyright: reportMissingImports=false

import functools
import importlib

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.bench.models.building import (
    BATCH,
    integers,
    next_token,
)
from experiments.bench.models.measure import Case

VOCABULARY, LENGTH, WIDTH = 256, 24, 64
SIZES = {
    "num_layers": 2, "embed_dim": WIDTH, "hidden_dim": 128, "num_heads": 4, "head_dim": 16, "num_kv_heads": 2,
}  # fmt: skip
HUGGING = {"vocab_size": VOCABULARY, "rope_theta": 10_000, "norm_eps": 1e-6}


def tunix_model(family: str, name: str, **settings) -> nnx.Module:
    """A model of Tunix, on one device."""
    module = importlib.import_module(f"tunix.models.{family}.model")
    if isinstance(settings.get("remat_config"), str):
        settings["remat_config"] = module.RematConfig[settings["remat_config"]]
    config = module.ModelConfig(**SIZES, **settings)
    return getattr(module, name)(config, rngs=nnx.Rngs(0))


def tunix_inputs(tokens: jax.Array) -> tuple:
    """Tokens, positions, no cache, and a causal mask, with a batch axis of one."""
    length = tokens.shape[0]
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    return tokens[None], jnp.arange(length)[None], None, mask


def tunix_case(model: nnx.Module, narrow: bool = False, **options) -> Case:
    """Next tokens by a model of Tunix."""

    def loss(model, tokens):
        return next_token(model(*tunix_inputs(tokens))[0][0], tokens)

    return Case(loss, model, (integers(VOCABULARY, LENGTH),), options, narrow)


def llama(**settings) -> nnx.Module:
    """Llama 3."""
    return tunix_model("llama3", "Llama3", **HUGGING, **settings)


def gemma3(**settings) -> nnx.Module:
    """Gemma 3, whose parameters are bfloat16 unless said otherwise."""
    return tunix_model("gemma3", "Gemma3", num_embed=VOCABULARY, sliding_window_size=8, **settings)


def lora(wrt: bool) -> Case:
    """Llama 3 with adapters; either these are trained alone, or all of it."""
    import qwix

    provider = qwix.LoraProvider(module_path=".*(proj|einsum).*", rank=4, alpha=2.0)
    example = tunix_inputs(integers(VOCABULARY, LENGTH)[0])
    model = qwix.apply_lora_to_model(llama(), provider, *example, rngs=nnx.Rngs(0))
    return tunix_case(model, wrt=nnx.LoRAParam) if wrt else tunix_case(model)


def quantised() -> Case:
    """Llama 3 whose products are rounded to eight bits in training."""
    import qwix

    rule = qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
    example = tunix_inputs(integers(VOCABULARY, LENGTH)[0])
    model = qwix.quantize_model(llama(), qwix.QtProvider([rule]), *example)
    return tunix_case(model, narrow=True)


def mamba(package: str, **settings) -> Case:
    """State-space models in NNX."""
    module = importlib.import_module(package)
    number = package.removeprefix("mamba").removesuffix("_jax")
    config = getattr(module, f"Mamba{number}Config")(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=16, head_dim=16, chunk_size=8,
        num_hidden_layers=2, **settings,
    )  # fmt: skip
    model = getattr(module, f"Mamba{number}ForCausalLM")(config, rngs=nnx.Rngs(0))

    def loss(model, tokens):
        return next_token(model(tokens[None])["logits"][0], tokens)

    return Case(loss, model, (integers(VOCABULARY, LENGTH),))


def nano_moe() -> Case:
    """A mixture of experts with dropout, by a key for each record, and a loss that balances them."""
    from nano_moe import NanoMoE, NanoMoEConfig

    model = NanoMoE(NanoMoEConfig(n_layers=2, d_model=WIDTH, d_ff=128, block_size=LENGTH))
    tokens = integers(VOCABULARY, LENGTH)
    params = model.init(jax.random.key(0), tokens[:1])["params"]

    def loss(params, ids, key):
        logits, balance = model.apply({"params": params}, ids[None], False, rngs={"dropout": key})
        return next_token(logits[0], ids) + 0.01 * balance

    return Case(loss, params, (tokens, jax.random.split(jax.random.key(1), BATCH)))


def griffin() -> Case:
    """RecurrentGemma: linear recurrences and local attention."""
    from recurrentgemma import common
    from recurrentgemma import jax as recurrentgemma

    kinds = (common.TemporalBlockType.RECURRENT, common.TemporalBlockType.ATTENTION)
    config = common.GriffinConfig(
        vocab_size=VOCABULARY, width=WIDTH, mlp_expanded_width=128, num_heads=4, block_types=kinds,
        embeddings_scale_by_sqrt_dim=True, attention_window_size=8, logits_soft_cap=30.0,
        scan_type=common.ScanType.LINEAR_NATIVE,
    )  # fmt: skip
    model = recurrentgemma.Griffin(config, dtype=jnp.float32, param_dtype=jnp.float32)
    tokens = integers(VOCABULARY, LENGTH)
    positions = jnp.arange(LENGTH)[None]
    params = model.init(jax.random.key(0), tokens[:1], positions)

    def loss(params, ids):
        return next_token(model.apply(params, ids[None], positions)[0][0], ids)

    return Case(loss, params, (tokens,))


QWEN = {**HUGGING, "use_tied_embedding": True}
CASES = {
    "Llama 3, tunix": lambda: tunix_case(llama()),
    "Llama 3, tied, tunix": lambda: tunix_case(llama(weight_tying=True)),
    "Llama 3, blocks under remat, tunix": lambda: tunix_case(llama(remat_config="DECODER")),
    "Gemma 3, float32, tunix": lambda: tunix_case(gemma3(param_dtype=jnp.float32)),
    "Gemma 3, bfloat16, tunix": lambda: tunix_case(gemma3(), narrow=True),
    "Qwen 2, tunix": lambda: tunix_case(tunix_model("qwen2", "Qwen2", **QWEN)),
    "Qwen 3, tunix": lambda: tunix_case(tunix_model("qwen3", "Qwen3", **QWEN)),
    "Qwen 3, mixture of experts, tunix": lambda: tunix_case(
        tunix_model("qwen3", "Qwen3", **QWEN, num_experts=4, num_experts_per_tok=2)
    ),
    "Llama 3 with LoRA, adapters alone, qwix": lambda: lora(True),
    "Llama 3 with LoRA, all, qwix": lambda: lora(False),
    "Llama 3 in int8, qwix": quantised,
    "Mamba 2, mamba2-jax": functools.partial(mamba, "mamba2_jax"),
    "Mamba 3, mamba3-jax": functools.partial(mamba, "mamba3_jax"),
    "mixture of experts, nano-moe-jax": nano_moe,
    "Griffin, recurrentgemma": griffin,
}
