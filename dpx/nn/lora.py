"""Low-rank adapters on a Llama (LoRA; Hu et al., arXiv 2106.09685)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from dpx.nn.llama import PROJECTIONS, Llama


def attach(
    model: Llama,
    *,
    projections: Sequence[str] = ("query", "value"),
    rank: int = 8,
    alpha: float = 8.0,
    layers: int | None = None,
    train_first: bool = True,
    shift: bool = False,
    seed: int = 0,
) -> None:
    """Puts adapters on projections of a model, which changes nothing until they are trained.

    A projection W becomes W + alpha/rank · A·B, with A (in, rank) random and B (rank, out) zero. What is to
    be trained are `nnx.LoRAParam`s:

        lora.attach(model, rank=8)
        graphdef, params = nnx.split(model)
        dpx.training.fit(loss_fn, params, data, wrt=nnx.LoRAParam, ...)

    With `train_first=False` that is B alone. A is then a random projection that the seed makes public, so the
    gradient is linear in W's, and there are half as many coordinates to add noise to.

    Args:
      model: Is changed.
      projections: Which, of "query", "key", "value", "out", "gate", "up" and "down".
      rank: Columns of A.
      alpha: Of the factor alpha/rank.
      layers: How many layers get adapters, the last ones; all by default. Those before are then constant, and
        what they make of a text (`Llama.trunk`) may be computed once.
      train_first: Whether A is trained too.
      shift: Adds a vector (d,) to what enters the head, zero at first. It is a bias of the logits with few
        parameters, and moves the odds of single tokens, in which texts of another kind differ most.
      seed: Of A, public.

    Raises:
      ValueError: for projections that do not exist, numbers out of range, or a model that has adapters: the
        factor alpha/rank is one for all, so that new ones would change what the others add.
    """
    if model.adapters or model.shift is not None:
        raise ValueError(
            "model has adapters, and must have none: attach all of them in one call, to a new model"
        )
    unknown = [name for name in projections if name not in PROJECTIONS]
    if unknown or not (projections or shift):
        raise ValueError(
            f"projections={tuple(projections)} must be some of {', '.join(PROJECTIONS)}: or ask for a shift"
        )
    count = model.num_layers if layers is None else layers
    if not 1 <= count <= model.num_layers:
        raise ValueError(
            f"layers={layers} must be from 1 to {model.num_layers}: the model has no more"
        )
    if rank < 1:
        raise ValueError(f"rank={rank} must be at least 1")
    if not 0 < alpha < float("inf"):
        raise ValueError(f"alpha={alpha} must be positive and finite")
    model.adapter_scale = alpha / rank
    if shift:
        model.shift = nnx.LoRAParam(jnp.zeros(model.norm.shape))
    first = nnx.LoRAParam if train_first else nnx.Param
    for name in projections:
        key = jax.random.fold_in(jax.random.key(seed), PROJECTIONS.index(name))
        _, inputs, outputs = model.layers[name].shape
        drawn = jax.random.normal(key, (count, inputs, rank)) * inputs**-0.5
        model.adapters[name] = nnx.Dict(
            first=first(drawn), second=nnx.LoRAParam(jnp.zeros((count, rank, outputs)))
        )
