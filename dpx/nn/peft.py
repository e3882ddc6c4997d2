"""Adapters in folders, as the package `peft` saves them: adapter_config.json and adapter_model.safetensors.

It needs the extra `lm`: pip install -e ".[lm]".
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx.nn import lora
from dpx.nn.pretrained.decoder import Decoder
from dpx.nn.pretrained.families import FAMILIES
from dpx.nn.pretrained.file_settings import Keys
from dpx.nn.pretrained.folder import open_safetensors, read_array, read_json
from dpx.nn.pretrained.layers import Layers
from dpx.nn.pretrained.loading import checked
from dpx.nn.pretrained.packages import needed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BEGIN = "base_model.model."
# Keys of adapter_config.json that do not affect what saved adapters compute.
_UNUSED = """
    auto_mapping base_model_name_or_path exclude_modules fan_in_fan_out inference_mode layers_pattern
    layers_to_transform lora_dropout megatron_core peft_version qalora_group_size revision runtime_config
    target_modules task_type
"""
# Keys that affect it, unless they have this value.
_NEUTRAL = {
    "bias": "none",
    "ensure_weight_tying": False,
    "lora_bias": False,
    "use_bdlora": False,
    "use_dora": False,
    "use_qalora": False,
}


def load(model: Layers, folder: str | Path) -> None:
    """Puts the adapters in a folder on the model that they were made for.

    Args:
      model: A `Decoder` or an `Encoder` without adapters, which is changed.
      folder: A folder in which `peft` saved LoRA, plain or scaled by alpha/√rank (`use_rslora`).

    Raises:
      ModuleNotFoundError: without the package safetensors.
      ValueError: for files that are missing or damaged, unknown settings or arrays, adapters of another
        model, or a model that has adapters.
    """
    folder = Path(folder)
    if model.adapters or model.shift is not None:
        raise ValueError("model has adapters, and must have none: load it anew")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} must hold {CONFIG}, and does not: check the path")
    rank, scale = _settings(folder)
    opened = open_safetensors(folder / WEIGHTS, needed("safetensors", "Adapters"))
    count = model.settings.num_layers
    wanted = {
        f"{module.format(number)}.lora_{factor}.weight": (name, number, factor)
        for name, module in lora.modules(model).items()
        for number in range(count)
        for factor in "AB"
    }
    prefix = FAMILIES[model.settings.family].prefix
    factors, layers = {}, {"A": set(), "B": set()}
    for stored in sorted(opened.keys()):
        place = wanted.get(stored.removeprefix(_BEGIN).removeprefix(prefix))
        if place is None:
            raise ValueError(
                f"{folder / WEIGHTS} has {stored}, which is no adapter of a layer of this model: load "
                "its own model"
            )
        name, number, factor = place
        inputs, outputs = model.layers[name].shape[1:]
        shape = (rank, inputs) if factor == "A" else (outputs, rank)
        array = checked(read_array(opened, stored, folder), stored, folder / WEIGHTS, shape)
        # A layer without an adapter has zeros for both factors.
        zeros = {"A": np.zeros((count, inputs, rank)), "B": np.zeros((count, rank, outputs))}
        factors.setdefault(name, zeros)[factor][number] = array.T
        layers[factor].add((number, name))
    if layers["A"] != layers["B"] or not factors:
        raise ValueError(f"{folder / WEIGHTS} must hold both factors of adapters: fetch it again")
    model.adapter_scale, (first, _) = scale, min(layers["A"])
    for name, pair in factors.items():
        one, two = (nnx.LoRAParam(jnp.asarray(pair[x][first:], jnp.float32)) for x in "AB")
        model.adapters[name] = nnx.Dict(first=one, second=two)


def _settings(folder: Path) -> tuple[int, float]:
    """The rank of adapters, and the factor that multiplies them."""
    keys = Keys(str(folder / CONFIG), read_json(folder / CONFIG))
    if (kind := keys.read("peft_type")) != "LORA":
        raise keys.wrong("peft_type", kind, "must be LORA")
    if (drawn := keys.read("init_lora_weights", True)) not in (True, False, "gaussian"):
        raise keys.wrong(
            "init_lora_weights", drawn, "may change the model that adapters are put on"
        )
    rank, alpha = keys.size("r"), keys.number("lora_alpha")
    scale = lora.scale(rank, alpha, rslora=keys.flag("use_rslora", False))
    keys.close(_UNUSED.split(), _NEUTRAL)
    return rank, scale


def save(model: Layers, folder: str | Path, *, base: str) -> None:
    """Saves the adapters of a model, so that `peft` and `load` can put them on the same model again.

    The shift of a decoder (see `dpx.nn.lora.attach`) becomes the bias of an adapter on the head
    (`lora_bias`). `load` does not read such adapters, and peft does not merge them.

    Args:
      model: A `Decoder` or an `Encoder` with adapters.
      folder: The folder, which is made if needed; files of these names in it are replaced.
      base: The folder or the name of the model without adapters, for `adapter_config.json`.

    Raises:
      ModuleNotFoundError: without the package safetensors.
      ValueError: for a model without adapters.
    """
    from_numpy = needed("safetensors.numpy", "Adapters").save_file
    if not model.adapters and model.shift is None:
        raise ValueError("model has no adapters, and must have some: attach and train them")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    family, last = FAMILIES[model.settings.family], model.settings.num_layers
    is_decoder = isinstance(model, Decoder)
    headed = is_decoder or model.settings.labels > 0
    prefix = family.prefix if headed else ""
    factors = {}
    for name, pair in model.adapters.items():
        count = pair["first"].shape[0]
        for i, both in enumerate(zip(pair["first"][...], pair["second"][...], strict=True)):
            factors[prefix + family.module(name).format(last - count + i)] = both
    bias = {}
    if isinstance(model, Decoder) and model.shift is not None:
        factors["lm_head"], bias["lm_head"] = _of_shift(model, model.shift[...])
    rank = next(iter(factors.values()))[0].shape[-1]
    arrays = {}
    for module, (first, second) in factors.items():
        arrays[f"{_BEGIN}{module}.lora_A.weight"] = _plain(first.T)
        arrays[f"{_BEGIN}{module}.lora_B.weight"] = _plain(second.T)
        if bias:
            zero = np.zeros(second.shape[-1], np.float32)
            arrays[f"{_BEGIN}{module}.lora_B.bias"] = _plain(bias.get(module, zero))
    from_numpy(arrays, folder / WEIGHTS, metadata={"format": "pt"})
    encoders = None if headed else "FEATURE_EXTRACTION"  # for SEQ_CLS peft asks for a head too
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_decoder else encoders,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": model.adapter_scale * rank,
        "lora_dropout": 0.0,
        "lora_bias": bool(bias),
        "bias": "none",
        "fan_in_fan_out": not family.turned,
        "use_rslora": False,
        "target_modules": "|".join(re.escape(module) for module in factors),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _of_shift(model: Decoder, shift: jax.Array) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The factors of an adapter on the head, which are zero, and the bias with the effect of the shift."""
    ranks = [pair["first"].shape[-1] for pair in model.adapters.values()]
    rank, settings = ranks[0] if ranks else 1, model.settings
    head = model.embed[...].T if settings.tied else model.head[...]
    bias = np.asarray(shift, np.float32) @ np.asarray(head, np.float32) / model.adapter_scale
    zeros = np.zeros((settings.dim, rank)), np.zeros((rank, settings.vocab_size))
    return zeros, bias


def _plain(array) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array, np.float32))
