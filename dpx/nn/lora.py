"""Low-rank adapters on a pretrained model (LoRA; Hu et al., arXiv 2106.09685), as in the package `peft`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from dpx.nn.pretrained.families import FAMILIES
from dpx.nn.pretrained.layers import Layers

ALL = "all-linear"


def attach(
    model: Layers,
    *,
    target_modules: str | Sequence[str] = ("q_proj", "v_proj"),
    rank: int = 8,
    alpha: float = 8.0,
    rslora: bool = False,
    layers: int | None = None,
    train_first: bool = True,
    shift: bool = False,
    seed: int = 0,
) -> None:
    """Puts adapters on projections of a model. Its outputs do not change until the adapters are trained.

    A projection W becomes W + s·A·B, with A (in, rank) random and B (rank, out) zero. The factor s is
    alpha/rank, or alpha/√rank with `rslora` (arXiv 2312.03732). The trainable parameters are
    `nnx.LoRAParam`s:

        lora.attach(model, rank=8)
        graphdef, params = nnx.split(model)
        dpx.training.fit(loss_fn, params, data, wrt=nnx.LoRAParam, ...)

    With `train_first=False` only B is trained. A is then a random projection with a public seed, so that the
    gradient is linear in that of W, and half as many coordinates get noise.

    Args:
      model: A `Decoder` or an `Encoder`, which is changed.
      target_modules: The projections, by the names of their modules in `transformers`, or the ends of these,
        such as "q_proj", "c_attn" or "attention.output.dense"; "all-linear" is all projections of each layer.
      rank: The number of columns of A.
      alpha: The alpha in the factor s.
      rslora: Whether s is alpha/√rank.
      layers: The number of layers with adapters, which are the last ones; all by default. The layers before
        are constant then, and their output for a text (`Decoder.trunk`) may be computed once.
      train_first: Whether A is trained too.
      shift: Whether a vector (d,), zero at first, is added to the input of a decoder's head. It is a bias of
        the logits with few parameters, and changes the odds of single tokens, in which texts of another kind
        differ most.
      seed: The public seed of A.

    Raises:
      ValueError: for unknown modules, numbers out of range, a shift of an encoder, or a model that has
        adapters: all adapters share s, so that new ones would change the effect of the others.
    """
    if model.adapters or model.shift is not None:
        raise ValueError(
            "model has adapters, and must have none: attach all of them in one call, to a new model"
        )
    projections = chosen(model, target_modules) if target_modules or not shift else ()
    last = model.settings.num_layers
    count = last if layers is None else layers
    if not 1 <= count <= last:
        raise ValueError(f"layers={layers} must be from 1 to {last}: the model has no more")
    model.adapter_scale = scale(rank, alpha, rslora=rslora)
    if shift:
        if not hasattr(model, "logits"):
            raise ValueError(
                "shift=True must be False for an encoder, which has no logits of tokens"
            )
        model.shift = nnx.LoRAParam(jnp.zeros(model.norm.shape))
    first = nnx.LoRAParam if train_first else nnx.Param
    for name in projections:
        key = jax.random.fold_in(jax.random.key(seed), model.projections.index(name))
        _, inputs, outputs = model.layers[name].shape
        drawn = jax.random.normal(key, (count, inputs, rank)) * inputs**-0.5
        model.adapters[name] = nnx.Dict(
            first=first(drawn), second=nnx.LoRAParam(jnp.zeros((count, rank, outputs)))
        )


def scale(rank: int, alpha: float, *, rslora: bool = False) -> float:
    """The factor of A·B; raises ValueError for numbers out of range."""
    if rank < 1:
        raise ValueError(f"rank={rank} must be at least 1")
    if not 0 < alpha < float("inf"):
        raise ValueError(f"alpha={alpha} must be positive and finite")
    return alpha / (rank**0.5 if rslora else rank)


def modules(model: Layers) -> dict[str, str]:
    """For each projection, the name of its module in files, with {} for the number of the layer."""
    family = FAMILIES[model.settings.family]
    return {name: family.module(name) for name in model.projections}


def chosen(model: Layers, target_modules: str | Sequence[str]) -> tuple[str, ...]:
    """The projections that `target_modules` name.

    Raises:
      ValueError: for a name that no module of a layer has.
    """
    known = modules(model)
    targets = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    if ALL in targets:
        return tuple(known)
    # A target is a module, or its last parts.
    matches = {
        target: [name for name, module in known.items() if f".{module}".endswith(f".{target}")]
        for target in targets
    }
    unknown = [target for target, names in matches.items() if not names]
    if unknown or not targets:
        ends = sorted({module.rpartition("{}.")[2] for module in known.values()})
        raise ValueError(
            f"target_modules={tuple(targets)} must be {ALL!r} or some of {', '.join(ends)}"
        )
    names = {name for names in matches.values() for name in names}
    return tuple(name for name in known if name in names)
