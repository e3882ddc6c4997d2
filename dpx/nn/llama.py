"""A decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention and a gated MLP.

Touvron et al., "LLaMA" (arXiv 2302.13971); rotary positions are those of arXiv 2104.09864, grouped queries
those of arXiv 2305.13245. `dpx.nn.pretrained` reads such models from GGUF files, and `dpx.nn.lora` puts
adapters on them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from dpx import attention
from dpx._validate import check_positive
from dpx.nn.embedding import check_tokens

PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down")


class Llama(nnx.Module):
    """Decoder-only transformer whose layers are one scan over stacked parameters.

    All state is parameters: `graphdef, params = nnx.split(model)` once, then plain functions of params.

        graphdef, params = nnx.split(model)
        logits = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))(params, tokens)

    Rotary positions turn pairs of coordinates of which one lies in the first half of a head and the other in
    the second half, as in Hugging Face; `dpx.nn.pretrained` reorders those of GGUF files, which lie side by
    side.

    Attributes (constructor arguments):
      vocab_size: M tokens.
      dim: d, width of the residual stream.
      num_layers: N, the length of the first axis of every array in `layers`.
      num_heads: Heads of the queries.
      num_kv_heads: Heads of keys and values, which divide `num_heads`; as many by default.
      head_dim: Width of a head, by default d / num_heads.
      mlp_dim: Hidden width of the gated MLP, by default 3d.
      rope_theta: Base of the wavelengths of rotary positions.
      rope_factors: Divisors of the head_dim / 2 frequencies, for models that were stretched to long inputs.
      norm_epsilon: Added to the mean square in RMSNorm.
      tied: Whether the logits use the embedding table or a head of their own.
      dtype: Of activations. Norms, attention weights and logits are float32 in any case.
      param_dtype: Of the stored parameters.
      remat: Computes each layer anew in the backward pass, which then holds one layer's activations.
      frozen: Matrices are constants: they have no gradient, whoever asks for it, and adapters are what is
        trained. With bfloat16 the gradient of activations is then multiplied in bfloat16 too, with sums in
        float32, which on processors with units for that takes a third of the time.
      unroll: Compiles every layer on its own instead of a loop: slower to compile, and faster on CPUs.
      context_length: The most tokens of a text that the model was made for, beyond which its answers are of
        no use; None for no limit.
      rngs: Random keys for the initial parameters.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        dim: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        mlp_dim: int | None = None,
        rope_theta: float = 10000.0,
        rope_factors: tuple[float, ...] | None = None,
        norm_epsilon: float = 1e-5,
        tied: bool = True,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        remat: bool = False,
        frozen: bool = False,
        unroll: bool = False,
        context_length: int | None = None,
        rngs: nnx.Rngs,
    ):
        sizes = {"vocab_size": vocab_size, "dim": dim, "num_layers": num_layers}
        for name, value in (sizes | {"num_heads": num_heads}).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(
                f"num_kv_heads={kv_heads} must be at least 1 and divide num_heads={num_heads}"
            )
        if head_dim is None and dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide dim={dim}: or give head_dim")
        width = dim // num_heads if head_dim is None else head_dim
        if width < 2 or width % 2:
            raise ValueError(f"head_dim={width} must be even: rotary positions turn pairs")
        if rope_factors is not None and len(rope_factors) != width // 2:
            raise ValueError(
                f"rope_factors has {len(rope_factors)} numbers: it must have {width // 2}, one a pair"
            )
        check_positive(rope_theta, "rope_theta")
        check_positive(norm_epsilon, "norm_epsilon", zero=True)
        for factor in rope_factors or ():
            check_positive(factor, "rope_factors")
        hidden = 3 * dim if mlp_dim is None else mlp_dim
        if hidden < 1:
            raise ValueError(f"mlp_dim={hidden} must be at least 1")
        self.vocab_size, self.num_heads, self.num_kv_heads = vocab_size, num_heads, kv_heads
        self.rope_theta, self.rope_factors = rope_theta, rope_factors
        self.norm_epsilon, self.dtype, self.remat = norm_epsilon, jnp.dtype(dtype), remat
        self.frozen, self.unroll, self.context_length = frozen, unroll, context_length

        def normal(*shape: int) -> nnx.Param:
            drawn = jax.random.normal(rngs.params(), shape, jnp.float32)
            return nnx.Param((drawn * shape[-2] ** -0.5).astype(param_dtype))

        def ones(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.ones(shape, param_dtype))

        own, shared = num_heads * width, kv_heads * width
        widths = {
            "query": (dim, own),
            "key": (dim, shared),
            "value": (dim, shared),
            "out": (own, dim),
            "gate": (dim, hidden),
            "up": (dim, hidden),
            "down": (hidden, dim),
        }
        small = jax.random.normal(rngs.params(), (vocab_size, dim)) * 0.02
        self.embed = nnx.Param(small.astype(param_dtype))
        self.layers = nnx.Dict(
            {name: normal(num_layers, *shape) for name, shape in widths.items()}
            | {name: ones(num_layers, dim) for name in ("attention_norm", "mlp_norm")}
        )
        self.norm = ones(dim)
        self.head = None if tied else normal(dim, vocab_size)
        # By projection, the two factors (K, in, r) and (K, r, out) of adapters on the last K layers.
        self.adapters = nnx.Dict()
        self.adapter_scale = 1.0
        # (d,), added to what enters the head: a bias of the logits of low rank.
        self.shift: nnx.LoRAParam | None = nnx.data(None)

    @property
    def num_layers(self) -> int:
        """N."""
        return self.layers["query"].shape[0]

    @property
    def first_adapted(self) -> int:
        """The first layer with adapters; 0 where there are none, as all parameters may be trained then."""
        counts = [pair["first"].shape[0] for pair in self.adapters.values()]
        if counts:
            return self.num_layers - counts[0]
        return 0 if self.shift is None else self.num_layers

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token.

        Args:
          tokens: (..., L) ids with any leading axes; pad short texts on the right, where no text looks.

        Returns:
          (..., L, M) float32.
        """
        return self.logits(self.trunk(tokens))

    def trunk(self, tokens: jax.Array) -> jax.Array:
        """What enters the first layer with adapters: tokens (..., L) -> (..., L, d) in `dtype`.

        Where only adapters are trained it never changes, so it can be computed once for each text.

        Raises:
          ValueError: for more tokens than `context_length`, and outside `jit` for tokens that are not in the
            vocabulary, or no token at all.
        """
        check_tokens(tokens, self.vocab_size)
        if self.context_length is not None and tokens.shape[-1] > self.context_length:
            raise ValueError(
                f"tokens of shape {tokens.shape} must be at most {self.context_length} in a text, for which "
                "the model was made: cut them"
            )
        table = self.embed[...]
        if self.frozen:
            table = lax.stop_gradient(table)
        if self.frozen and table.dtype == jnp.bfloat16:
            # As integers: of bfloat16 numbers XLA makes a float32 copy before it takes rows, on CPUs.
            bits = lax.bitcast_convert_type(table, jnp.uint16)[tokens]
            x = lax.bitcast_convert_type(bits, jnp.bfloat16)
        else:
            x = table[tokens]
        return self._run(x.astype(self.dtype), 0, self.first_adapted)

    def logits(self, x: jax.Array) -> jax.Array:
        """The rest of the model after `trunk`: (..., L, d) -> (..., L, M) float32."""
        x = self._run(x, self.first_adapted, self.num_layers)
        x = self._normed(x, self.norm[...])
        x = x if self.shift is None else x + self.shift[...].astype(x.dtype)
        wide = jnp.dtype(jnp.float32)
        if self.head is None:
            return self._product(x, self.embed[...], wide, axis=1)
        return self._product(x, self.head[...], wide)

    def _run(self, x: jax.Array, start: int, stop: int) -> jax.Array:
        """Layers `start` to `stop`, with their adapters if these are the layers that have any."""
        if start == stop:
            return x

        def part(stacked: Any) -> Any:
            whole = start == 0 and stop == self.num_layers
            return {k: v[...] if whole else v[...][start:stop] for k, v in stacked.items()}

        adapted = stop == self.num_layers
        pairs = {
            name: (pair["first"][...], pair["second"][...]) for name, pair in self.adapters.items()
        }
        rotation = self._rotation(x.shape[-2])
        causal = jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), bool))

        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            matrices, adapters = weights
            return self._layer(x, matrices, adapters, rotation, causal), None

        layer = jax.checkpoint(layer, prevent_cse=False) if self.remat else layer
        weights = part(self.layers), pairs if adapted else {}
        return lax.scan(layer, x, weights, unroll=self.unroll)[0]

    def _layer(self, x, weights, adapters, rotation, causal):
        """x + Attention(RMSNorm(x)), then x + MLP(RMSNorm(x))."""

        def project(name: str, x: jax.Array) -> jax.Array:
            y = self._product(x, weights[name], x.dtype)
            if name in adapters:
                first, second = (factor.astype(x.dtype) for factor in adapters[name])
                y = y + self.adapter_scale * ((x @ first) @ second)
            return y

        def heads(x: jax.Array, *count: int) -> jax.Array:
            """(..., L, heads · D) to (..., *count, L, D)."""
            split = x.reshape(*x.shape[:-1], *count, -1)
            return jnp.moveaxis(split, -len(count) - 2, -2)

        normed = self._normed(x, weights["attention_norm"])
        # A head of keys serves all queries of its group: (..., groups, queries of a group, L, D).
        groups = self.num_kv_heads
        q = heads(project("query", normed), groups, self.num_heads // groups)
        k = heads(project("key", normed), groups, 1)
        v = heads(project("value", normed), groups, 1)
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        mixed = attention.dot_product_attention(q, k, v, mask=causal)
        mixed = jnp.moveaxis(mixed, -2, -4).reshape(*x.shape[:-1], -1)
        x = x + project("out", mixed)
        normed = self._normed(x, weights["mlp_norm"])
        hidden = jax.nn.silu(project("gate", normed)) * project("up", normed)
        return x + project("down", hidden)

    def _product(
        self, x: jax.Array, weights: jax.Array, dtype: jnp.dtype, axis: int = 0
    ) -> jax.Array:
        """`x` times `weights` along that axis of theirs, in the dtype of `x`, returned in `dtype`."""
        weights = weights.astype(x.dtype)
        if self.frozen:
            return _constant_product(x, weights, dtype, axis)
        return _contracted(x, weights, dtype, axis)

    def _normed(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """RMSNorm in float32, returned in the dtype of `x`."""
        wide = x.astype(jnp.float32)
        size = lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.norm_epsilon)
        return (wide * size * scale.astype(jnp.float32)).astype(x.dtype)

    def _rotation(self, length: int) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine (L, D/2) of the angle by which each pair of a head turns at each position."""
        pairs = self.layers["query"].shape[-1] // self.num_heads // 2
        frequencies = self.rope_theta ** (-jnp.arange(pairs) / pairs)
        if self.rope_factors is not None:
            frequencies = frequencies / jnp.asarray(self.rope_factors)
        angles = jnp.arange(length)[:, None] * frequencies
        return jnp.cos(angles), jnp.sin(angles)


def _contracted(x: jax.Array, weights: jax.Array, dtype: DTypeLike, axis: int) -> jax.Array:
    """x @ weights, or x @ weights.T for axis 1."""
    dims = (((x.ndim - 1,), (axis,)), ((), ()))
    return lax.dot_general(x, weights, dims, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _constant_product(x: jax.Array, weights: jax.Array, dtype: jnp.dtype, axis: int) -> jax.Array:
    """`_contracted`, of which `weights` are a constant; sums are float32, both ways.

    The barriers tie weights to what they are multiplied with. Without them the compiler finds copies of the
    weights, reordered, to be constants of the loops around this, and holds them all at once.
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


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns coordinate i of a head (..., L, D) together with coordinate i + D/2."""
    cosine, sine = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1).astype(x.dtype)
