"""Every public function that runs under `jit` is lowered for NVIDIA GPUs and for TPUs, which needs neither.

What is public follows from the package: a new function has to be lowered here, or be named among those that
run on the host.
"""

import functools
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpx
from dpx import attention, clipping, cross_attention, gram, noise, noisy_head, reattention
from dpx.nn import cross_attention as nn_cross_attention
from dpx.nn import gram_attention, linear_attention, recurrent, transformer
from dpx.recommend import metrics
from dpx.training import loop
from dpx.training.calibration import Privacy
from dpx.training.layout import Layout

PLATFORMS = ("cuda", "tpu")
KEY = jax.random.key(0)
BUDGET = {"epsilon": 1.0, "delta": 1e-5}
MEMORY = {"key_bound": 1.0, "value_bound": 1.0, "clip": True, **BUDGET}
HYPER = noisy_head.HyperParameters(1.0, 1.0, 1.0)
DESCENT = {"regularization": 5.0, "step_size": 0.05, "steps": 3}


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def moments(*shape):
    return reattention.Moments(ones(*shape), ones(*shape))


def features():
    return noisy_head.Features(ones(6, 3), ones(6, 3), ones(6))


def prompts():
    return noisy_head.Prompts(ones(4, 6, 3), ones(4, 6))


def token_loss(params, tokens):
    logits = params["embed"][tokens[:-1]] @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()


PARAMS = {"embed": np.ones((7, 4), np.float32)}
TOKENS = np.zeros((5, 6), np.int32)


def clipped(method, dtype=jnp.float32):
    gradient = clipping.clipped_grad(token_loss, l2_clip_norm=1.0, method=method)
    return lambda params, tokens: gradient(
        jax.tree.map(lambda x: x.astype(dtype), params), tokens
    ).grads


def privatized(key, params):
    step = dpx.privatize(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4.0, key=key)
    return step.update(params, step.init(params))[0]


def training_step(params, tokens, key):
    """The program of `training.fit`, with its optimizer."""
    privacy = Privacy(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        batch_size=4,
        num_examples=5,
        steps=3,
        delta=1e-5,
        unit="record",
    )
    optimizer = optax.chain(loop._mean(privacy, 4, key, "training"), optax.adam(0.1))
    state = params, optimizer.init(params)
    names = jnp.arange(len(tokens), dtype=jnp.uint32)
    places, mask = jnp.arange(4), jnp.ones(4, bool)
    return loop._step(
        token_loss, optimizer, privacy, Layout(None, 5), 4, False, False, None,
        state, ((tokens,), names), places, mask, 1, (key, 0), None,
    )  # fmt: skip


def model(build, *inputs, **options):
    graph, state = nnx.split(build(rngs=nnx.Rngs(0)))
    return (lambda state, *inputs: nnx.merge(graph, state)(*inputs, **options)), state, *inputs


def cross_layer(rngs):
    return nn_cross_attention.PrivateCrossAttention(
        6, 5, num_heads=2, head_dim=3, key_bound=1.0, value_bound=1.0, rngs=rngs
    )


def gram_layer(rngs):
    del rngs
    release = gram.release(KEY, ones(3, 50), column_bound=2.0, **BUDGET)
    return gram_attention.GramAttention(release, dpx.Ledger())


def released(key, keys, values, **options):
    return cross_attention.build(key, keys, values, **MEMORY, **options).query(keys)


def tree_of(structure):
    def build(key, x, w):
        return structure.build(key, x, w, **BUDGET)

    return build


# For every function, the function and its arguments.
CASES = {
    "attention.attention_weights": lambda: (attention.attention_weights, ones(4, 3), ones(5, 3)),
    "attention.boolean": lambda: (attention.boolean, ones(4, 3) > 0),
    "attention.dot_product_attention": lambda: (
        attention.dot_product_attention, ones(4, 3), ones(5, 3), ones(5, 2)
    ),
    "clipping.clipped_grad": lambda: (clipped("auto"), PARAMS, TOKENS),
    "clipping.clipped_grad in two passes": lambda: (clipped("two_pass"), PARAMS, TOKENS),
    "clipping.clipped_grad by vmap": lambda: (clipped("vmap"), PARAMS, TOKENS),
    "clipping.clipped_grad in bfloat16": lambda: (clipped("auto", jnp.bfloat16), PARAMS, TOKENS),
    "clipping.record_keys": lambda: (clipping.record_keys, KEY, 0, jnp.arange(3)),
    "cross_attention.build": lambda: (released, KEY, ones(5, 2), ones(5, 2)),
    "cross_attention.build of random features": lambda: (
        functools.partial(released, features="random", num_features=8, value_domain="ball"),
        KEY, ones(5, 2), ones(5, 2),
    ),
    "cross_attention.build of trees": lambda: (
        functools.partial(released, mechanism="tree", degree=2, bins=8), KEY, ones(5, 2), ones(5, 2)
    ),
    "cross_attention.sketch.attend": lambda: (
        lambda m, q: cross_attention.sketch.attend(
            m, q, cross_attention.Domain("box", 2, 2, 1.0, 1.0, 1.0, 2.0),
            cross_attention.PolynomialFeatures(2, 2, 2.0),
        ),
        ones(6, 3), ones(4, 2),
    ),
    "gram.attention": lambda: (gram.attention, ones(3, 3)),
    "gram.project_psd": lambda: (gram.project_psd, ones(3, 3)),
    "gram.release": lambda: (
        lambda key, x: gram.release(key, x, column_bound=2.0, **BUDGET).matrix, KEY, ones(3, 50)
    ),
    "gram.symmetric_gaussian": lambda: (lambda key: gram.symmetric_gaussian(key, 4), KEY),
    "gram.wishart_mean": lambda: (
        lambda key, x: gram.wishart_mean(key, x, 50), KEY, jnp.eye(3)
    ),
    "nn.cross_attention.PrivateCrossAttention": lambda: model(cross_layer, ones(4, 6)),
    "nn.gram_attention.GramAttention": lambda: model(gram_layer, ones(3, 2)),
    "nn.linear_attention.LinearAttentionHead": lambda: model(
        lambda rngs: linear_attention.LinearAttentionHead(ones(3, 3)), ones(6, 3), ones(6)
    ),
    "nn.recurrent.Recurrent": lambda: model(
        functools.partial(recurrent.Recurrent, 9, 6, cell="gru", dim=8), jnp.zeros(6, jnp.int32)
    ),
    "nn.transformer.Transformer": lambda: model(
        functools.partial(transformer.Transformer, 9, 6, dim=8), jnp.zeros(6, jnp.int32)
    ),
    "nn.transformer.generate": lambda: (
        lambda key: transformer.generate(lambda t: ones(*t.shape, 9), key, 2, 6, start=0), KEY
    ),
    "noise.normal": lambda: (lambda key: noise.normal(key, (5,)), KEY),
    "noise.release": lambda: (
        lambda key, x: noise.release(
            key, x, sensitivity=1.0, noise_multiplier=1.0, label="a sum"
        ),
        KEY, ones(5),
    ),
    "noisy_head.corrupt": lambda: (
        lambda p: noisy_head.corrupt(p, 1, alpha=0.1, mu=1.0), noisy_head.Prompts(ones(6, 3), ones(6))
    ),
    "noisy_head.empirical_risk": lambda: (noisy_head.empirical_risk, ones(3, 3), features()),
    "noisy_head.enforce": lambda: (lambda f: noisy_head.enforce(f, HYPER), features()),
    "noisy_head.featurize": lambda: (noisy_head.featurize, prompts()),
    "noisy_head.fit": lambda: (
        lambda key, f: noisy_head.fit(key, f, HYPER, **DESCENT, **BUDGET).gamma, KEY, features()
    ),
    "noisy_head.fit_one_shot": lambda: (
        lambda key, f: noisy_head.fit_one_shot(
            key, f, HYPER, regularization=5.0, **BUDGET
        ).gamma,
        KEY, features(),
    ),
    "noisy_head.gradient_descent": lambda: (
        lambda f: noisy_head.gradient_descent(f, **DESCENT), features()
    ),
    "noisy_head.noisy_descent": lambda: (
        lambda key, f: noisy_head.noisy_descent(
            key, f, noisy_head.Descent(HYPER, **DESCENT), noise_multiplier=1.0
        ),
        KEY, features(),
    ),
    "noisy_head.one_shot": lambda: (
        lambda key, f: noisy_head.one_shot(
            key, f, HYPER, regularization=5.0, noise_multiplier=1.0
        ),
        KEY, features(),
    ),
    "noisy_head.population_risk": lambda: (
        lambda g: noisy_head.population_risk(g, 6), ones(3, 3)
    ),
    "noisy_head.predict": lambda: (noisy_head.predict, ones(3, 3), features()),
    "noisy_head.ridge": lambda: (lambda f: noisy_head.ridge(f, 5.0), features()),
    "noisy_head.sample_features": lambda: (
        lambda key: noisy_head.sample_features(key, 4, 6, 3), KEY
    ),
    "noisy_head.sample_prompt": lambda: (lambda key: noisy_head.sample_prompt(key, 6, 3), KEY),
    "noisy_head.sample_prompts": lambda: (
        lambda key: noisy_head.sample_prompts(key, 4, 6, 3), KEY
    ),
    "reattention.add": lambda: (reattention.add, moments(4), moments(4)),
    "reattention.attend": lambda: (
        reattention.attend, ones(4, 3), ones(5, 3), moments(5, 2), ones(5)
    ),
    "reattention.attention": lambda: (reattention.attention, ones(4, 5), moments(5, 2)),
    "reattention.attention_weights": lambda: (
        reattention.attention_weights, ones(4, 3), ones(5, 3), ones(5)
    ),
    "reattention.dense": lambda: (reattention.dense, moments(4, 3), moments(3, 2), moments(2)),
    "reattention.gelu": lambda: (reattention.gelu, moments(4)),
    "reattention.gelu_series": lambda: (reattention.gelu_series, moments(4)),
    "reattention.layer_norm": lambda: (
        reattention.layer_norm, moments(4, 3), ones(3), ones(3)
    ),
    "reattention.maximum": lambda: (reattention.maximum, moments(4), moments(4)),
    "reattention.relu": lambda: (reattention.relu, moments(4)),
    "reattention.rows": lambda: (reattention.rows, moments(4, 3), jnp.arange(2)),
    "recommend.metrics.hit_rate": lambda: (lambda r: metrics.hit_rate(r, 3), jnp.arange(4)),
    "recommend.metrics.ndcg": lambda: (lambda r: metrics.ndcg(r, 3), jnp.arange(4)),
    "recommend.metrics.target_ranks": lambda: (
        metrics.target_ranks, ones(4, 9), jnp.arange(4)
    ),
    "training.fit": lambda: (training_step, PARAMS, TOKENS, KEY),
    "training.privatize": lambda: (privatized, KEY, PARAMS),
}  # fmt: skip
