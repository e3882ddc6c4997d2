"""The parts that a decoder and an encoder share: stacked layers, adapters, and constant matrices."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from dpx.nn.embedding import check_tokens

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class Layers(nnx.Module):
    """A transformer whose layers are one scan over stacked parameters.

    All state is in parameters, so that a split model is a plain function of them:

        graphdef, params = nnx.split(model)
        outputs = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))(params, tokens)

    Attributes (constructor arguments):
      settings: A `DecoderSettings` or an `EncoderSettings`.
      dtype: The type of activations. Norms, attention weights and logits are always float32.
      param_dtype: The type of the stored parameters.
      remat: Whether each layer is recomputed in the backward pass, which then holds one layer's activations.
      frozen: Whether matrices are constants without gradients, so that only adapters are trained. With
        bfloat16 the gradient of activations is then multiplied in bfloat16 too, with sums in float32, which
        takes a third of the time on processors with units for that.
      unroll: Whether every layer is compiled on its own instead of a loop: slower to compile, faster on CPUs.
      rngs: Random keys for the initial parameters.
    """

    # The parameters that the settings require.
    embed: nnx.Param
    positions: nnx.Param
    types: nnx.Param
    norm: nnx.Param
    head: nnx.Param

    def __init__(
        self,
        settings: Any,  # of either
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        remat: bool = False,
        frozen: bool = False,
        unroll: bool = False,
        rngs: nnx.Rngs,
    ):
        outer, inner = settings.shapes()
        self.settings, self.dtype = settings, jnp.dtype(dtype)
        self.remat, self.frozen, self.unroll = remat, frozen, unroll

        def draw(name: str, *shape: int) -> nnx.Param:
            if name.endswith("norm"):
                drawn = jnp.full(shape, 1.0 - getattr(settings, "norm_offset", 0.0))
            elif name.endswith("bias"):
                drawn = jnp.zeros(shape)
            else:
                std = 0.02 if name in TABLES else shape[-2] ** -0.5
                drawn = jax.random.normal(rngs.params(), shape) * std
            return nnx.Param(drawn.astype(param_dtype))

        for name, shape in outer.items():
            setattr(self, name, draw(name, *shape))
        self.layers = nnx.Dict({k: draw(k, settings.num_layers, *v) for k, v in inner.items()})
        # For each projection, the factors (K, in, r) and (K, r, out) of adapters on the last K layers.
        self.adapters = nnx.Dict()
        self.adapter_scale = 1.0
        # (d,), added to the input of the head: a bias of the logits of low rank.
        self.shift: nnx.LoRAParam | None = nnx.data(None)

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of the matrices of a layer, which may have adapters."""
        return tuple(name for name, array in self.layers.items() if len(array.shape) == 3)

    def own(self) -> Iterator[tuple[str, nnx.Param, bool]]:
        """Yields all parameters but adapters: name, parameter, and whether it is stacked over layers."""
        for name, value in vars(self).items():
            if isinstance(value, nnx.Param) and name != "shift":
                yield name, value, False
        for name, value in self.layers.items():
            yield name, value, True

    @property
    def first_adapted(self) -> int:
        """The first layer with adapters; 0 without adapters, since then all parameters may be trained."""
        counts = [pair["first"].shape[0] for pair in self.adapters.values()]
        if counts:
            return self.settings.num_layers - counts[0]
        return 0 if self.shift is None else self.settings.num_layers

    def trunk(
        self, tokens: jax.Array, mask: jax.Array | None = None, *, stop: int | None = None
    ) -> jax.Array:
        """The input of the first layer with adapters: tokens (..., L) -> (..., L, d) in `dtype`.

        If only adapters are trained it never changes, and can be computed once for each text. `stop` is
        another layer, whose input is asked for.
        """
        stop = self.first_adapted if stop is None else stop
        return self._run(self._begin(tokens, mask), mask, 0, stop)

    def states(
        self, tokens: jax.Array, mask: jax.Array | None = None, *, last: int = 1, start: int = 0
    ) -> list[jax.Array]:
        """The hidden states after each of the `last` layers, (..., L, d) in `dtype`.

        Those of a decoder are not normalised yet. With `start`, at most the first layer whose state is asked
        for or that has adapters, `tokens` are the input of that layer, as `trunk` makes it.

        Raises:
          ValueError: as for a call, and for layers that there are not.
        """
        count = self.settings.num_layers
        most = count - max(start - 1, 0)
        if not 1 <= last <= most:
            raise ValueError(f"last={last} must be from 1 to {most}: the model has no more layers")
        x, found = tokens if start else self._begin(tokens, mask), []
        for stop in sorted({self.first_adapted, *range(count - last + 1, count + 1)}):
            if stop > start:
                x, start = self._run(x, mask, start, stop), stop
            if stop > count - last:
                found.append(x)
        return found

    def _begin(self, tokens: jax.Array, mask: jax.Array | None) -> jax.Array:
        """What enters the first layer, (..., L, d) in `dtype`."""
        raise NotImplementedError

    def _run(self, x: jax.Array, mask: jax.Array | None, start: int, stop: int) -> jax.Array:
        """x after layers `start` to `stop`, with their adapters if they have any."""
        raise NotImplementedError

    def _embedded(self, tokens: jax.Array, mask: jax.Array | None) -> jax.Array:
        """The embeddings of tokens (..., L), which are checked, as (..., L, d) in `dtype`."""
        settings = self.settings
        check_tokens(tokens, settings.vocab_size, mask)
        longest = settings.context_length
        if longest is not None and tokens.shape[-1] > longest:
            raise ValueError(
                f"tokens of shape {tokens.shape} must be at most {longest} in a text, for which "
                "the model was made: cut them"
            )
        return self._rows(self.embed, tokens)

    def _rows(self, table: nnx.Param, places: jax.Array) -> jax.Array:
        """Rows of a table, in `dtype`."""
        values = table[...]
        if self.frozen:
            values = lax.stop_gradient(values)
        if self.frozen and values.dtype == jnp.bfloat16:
            # As integers, since XLA on CPUs copies a whole bfloat16 table to float32 before it takes rows.
            bits = lax.bitcast_convert_type(values, jnp.uint16)[places]
            return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(self.dtype)
        return values[places].astype(self.dtype)

    def _scan(self, layer: Callable, x: jax.Array, start: int, stop: int, *more: jax.Array):
        """x after layers `start` to `stop`, either all of which have adapters or none.

        Each is `layer(x, parameters, adapters, *rows of more)`.
        """
        if start == stop:
            return x

        def part(stacked: jax.Array, first: int = 0) -> jax.Array:
            """The rows of these layers, where row 0 is of layer `first`."""
            rows = slice(start - first, stop - first)
            return stacked if rows == slice(0, len(stacked)) else stacked[rows]

        first = self.first_adapted
        weights = {name: part(value[...]) for name, value in self.layers.items()}
        pairs = {
            name: (part(pair["first"][...], first), part(pair["second"][...], first))
            for name, pair in (self.adapters.items() if start >= first else ())
        }

        def step(x: jax.Array, given: Any) -> tuple[jax.Array, None]:
            return layer(x, *given), None

        step = jax.checkpoint(step, prevent_cse=False) if self.remat else step
        more = tuple(part(array) for array in more)
        return lax.scan(step, x, (weights, pairs, *more), unroll=self.unroll)[0]

    def _outer(self) -> dict[str, jax.Array]:
        """The parameters that are not of layers."""
        return {name: value[...] for name, value, stacked in self.own() if not stacked}

    def _normed(self, name: str, x: jax.Array, weights: Any) -> jax.Array:
        """x after the norm of that name, which is LayerNorm with a bias and RMSNorm without, in float32."""
        wide, bias = x.astype(jnp.float32), weights.get(f"{name}_bias")
        if bias is not None:
            wide = wide - wide.mean(-1, keepdims=True)
        square = jnp.mean(jnp.square(wide), -1, keepdims=True)
        scale = weights[name].astype(jnp.float32) + getattr(self.settings, "norm_offset", 0.0)
        normed = wide * lax.rsqrt(square + self.settings.norm_epsilon) * scale
        normed = normed if bias is None else normed + bias.astype(jnp.float32)
        return normed.astype(x.dtype)

    def _project(self, name: str, x: jax.Array, weights: Any, adapters: Any) -> jax.Array:
        """x (..., in) after a projection of one layer with its bias and adapter: (..., out)."""
        y = self._product(x, weights[name], x.dtype)
        if (bias := weights.get(f"{name}_bias")) is not None:
            y = y + bias.astype(x.dtype)
        if name in adapters:
            first, second = (factor.astype(x.dtype) for factor in adapters[name])
            y = y + self.adapter_scale * ((x @ first) @ second)
        return y

    def _product(
        self, x: jax.Array, weights: jax.Array, dtype: DTypeLike, axis: int = 0
    ) -> jax.Array:
        """The product of `x` and `weights` along an axis of `weights`, in the dtype of `x`, as `dtype`."""
        weights = weights.astype(x.dtype)
        if self.frozen:
            return _constant_product(x, weights, jnp.dtype(dtype), axis)
        return _contracted(x, weights, dtype, axis)


TABLES = ("embed", "positions", "types")


def split_heads(x: jax.Array, *count: int) -> jax.Array:
    """(..., L, heads · D) to (..., *count, L, D)."""
    split = x.reshape(*x.shape[:-1], *count, -1)
    return jnp.moveaxis(split, -len(count) - 2, -2)


def _contracted(x: jax.Array, weights: jax.Array, dtype: DTypeLike, axis: int) -> jax.Array:
    """x @ weights, or x @ weights.T for axis 1."""
    dims = (((x.ndim - 1,), (axis,)), ((), ()))
    return lax.dot_general(x, weights, dims, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _constant_product(x: jax.Array, weights: jax.Array, dtype: jnp.dtype, axis: int) -> jax.Array:
    """`_contracted` with constant `weights`; sums are in float32, in both passes.

    Barriers tie the weights to the other factor. Without them the compiler moves transposed copies of the
    weights of all layers out of the loop over layers, and holds all copies at once.
    """
    x, weights = lax.optimization_barrier((x, weights))
    return _contracted(x, weights, jnp.float32, axis).astype(dtype)


def _forward(x, weights, dtype, axis):
    return _constant_product(x, weights, dtype, axis), weights


def _backward(dtype, axis, weights, cotangent):
    del dtype
    cotangent, weights = lax.optimization_barrier((cotangent.astype(weights.dtype), weights))
    back = _contracted(cotangent, weights, jnp.float32, 1 - axis)
    return back.astype(weights.dtype), None


_constant_product.defvjp(_forward, _backward)
