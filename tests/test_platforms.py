"""Every public function that runs under `jit` is lowered for NVIDIA GPUs and for TPUs, which needs neither.

What is public follows from the package: a new function has to be lowered here, or be named among those that
run on the host.
"""

import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpx
from dpx import attention, clipping, cross_attention, gram, noise, noisy_head, reattention
from dpx.cross_attention import baselines
from dpx.nn import cross_attention as nn_cross_attention
from dpx.nn import gram_attention, linear_attention, pretrained, recurrent, transformer
from dpx.recommend import metrics
from dpx.training import loop, users
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
    return lambda params, tokens: (
        gradient(jax.tree.map(lambda x: x.astype(dtype), params), tokens).grads
    )


def privatized(key, params):
    step = dpx.privatize(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=4.0, key=key)
    return step.update(params, step.init(params))[0]


def training_step(params, tokens, key):
    """The program of `training.fit`, with its optimizer."""
    privacy = Privacy(1.0, False, 1.0, spent=lambda steps: 1.0)
    optimizer = optax.chain(loop._mean(privacy, 4, key, "training"), optax.adam(0.1))
    state = params, optimizer.init(params)
    names = jnp.arange(len(tokens), dtype=jnp.uint32)
    places, mask = jnp.arange(4), jnp.ones(4, bool)
    found = loop._step(
        token_loss, optimizer, privacy, Layout(None, 5), loop.Computation(microbatch_size=4),
        state, ((tokens,), names), (places, mask, 1), (key, 0), None, None,
    )  # fmt: skip
    whose = users.numbered(np.arange(5) // 2, 3, 2)
    held, people = ((tokens,), *map(jnp.asarray, whose.spans)), jnp.arange(3)
    drawn = users.draw(held, people, clipping.record_keys(key, 0, people), 2)
    of_users = loop._step(
        token_loss, optimizer, privacy, Layout(None, 3), loop.Computation(microbatch_size=3, users=whose),
        state, drawn, (people, mask[:3], 1), (key, 0), None, None,
    )  # fmt: skip
    return found, of_users


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


# For every function, the function and its arguments.
CASES = {
    "attention.attention_weights": lambda: (attention.attention_weights, ones(4, 3), ones(5, 3)),
    "attention.boolean": lambda: (attention.boolean, ones(4, 3) > 0),
    "attention.dot_product_attention": lambda: (
        attention.dot_product_attention, ones(4, 3), ones(5, 3), ones(5, 2)
    ),
    "clipped_grad": lambda: (clipped("auto"), PARAMS, TOKENS),
    "clipped_grad in two passes": lambda: (clipped("two_pass"), PARAMS, TOKENS),
    "clipped_grad by vmap": lambda: (clipped("vmap"), PARAMS, TOKENS),
    "clipped_grad in bfloat16": lambda: (clipped("auto", jnp.bfloat16), PARAMS, TOKENS),
    "clipping.record_keys": lambda: (clipping.record_keys, KEY, 0, jnp.arange(3)),
    "cross_attention.build": lambda: (released, KEY, ones(5, 2), ones(5, 2)),
    "cross_attention.sketch.build of random features": lambda: (
        functools.partial(released, features="random", num_features=8, value_domain="ball"),
        KEY, ones(5, 2), ones(5, 2),
    ),
    "cross_attention.trees.build": lambda: (
        functools.partial(released, mechanism="tree", degree=2, bins=8), KEY, ones(5, 2), ones(5, 2)
    ),
    "cross_attention.baselines.fresh_noise": lambda: (
        lambda key, q, k, v: baselines.fresh_noise(key, q, k, v, **MEMORY).values,
        KEY,
        ones(4, 2),
        ones(5, 2),
        ones(5, 2),
    ),
    "cross_attention.baselines.mean_of_values": lambda: (
        lambda key, v: baselines.mean_of_values(key, v, value_bound=1.0, **BUDGET).values,
        KEY,
        ones(5, 2),
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
    "gram.wishart_mean": lambda: (
        lambda key, x: gram.wishart_mean(key, x, 50), KEY, jnp.eye(3)
    ),
    "nn.cross_attention.PrivateCrossAttention": lambda: model(cross_layer, ones(4, 6)),
    "nn.gram_attention.GramAttention": lambda: model(gram_layer, ones(3, 2)),
    "nn.linear_attention.LinearAttentionHead": lambda: model(
        lambda rngs: linear_attention.LinearAttentionHead(ones(3, 3)), ones(6, 3), ones(6)
    ),
    "nn.pretrained.Decoder": lambda: model(
        functools.partial(pretrained.Decoder, pretrained.DecoderSettings(9, dim=8, num_heads=2)),
        jnp.zeros(6, jnp.int32),
    ),
    "nn.pretrained.Encoder": lambda: model(
        functools.partial(pretrained.Encoder, pretrained.EncoderSettings(9, dim=8, num_heads=2)),
        jnp.zeros(6, jnp.int32),
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
    "noise.release": lambda: (
        lambda key, x: noise.release(
            key, x, sensitivity=1.0, noise_multiplier=1.0, label="a sum"
        ),
        KEY, ones(5),
    ),
    "noisy_head.corrupt": lambda: (
        lambda p: noisy_head.corrupt(p, 1, alpha=0.1, mu=1.0), prompts()
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
        reattention.attend, ones(4, 3), ones(5, 3), moments(5, 2), ones(5, 3)
    ),
    "reattention.attention": lambda: (reattention.attention, ones(4, 5), moments(5, 2)),
    "reattention.attention_weights": lambda: (
        reattention.attention_weights, ones(4, 3), ones(5, 3), ones(5, 3)
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
    "privatize": lambda: (privatized, KEY, PARAMS),
}  # fmt: skip

# These compute in 64 bits, whatever the platform: their problems are small, and their references exact.
WIDE = [name for name in CASES if name.startswith("noisy_head.") and name != "noisy_head.enforce"]
WIDE += ["gram.wishart_mean"]

# What runs on the host: it accounts, audits, reads files, counts, or sums integers over blocks of records.
HOST_MODULES = (
    "audit.", "data.", "ngram.", "nn.lora.", "nn.peft.", "noise.secure.", "noise.stream.", "privacy.",
    "release.", "noisy_head.moment_sums.", "recommend.item_gram.", "recommend.order.",
    "recommend.popularity.", "recommend.evidence.", "recommend.transitions.",
)  # fmt: skip
ON_HOST = {
    "calibrate_dpsgd", "dpsgd_epsilon", "explain_clipping", "gaussian_epsilon",
    "gaussian_noise_multiplier", "gram.planned_guarantee", "load", "poisson_batches", "save", "secret_key",
    "training.allocated_batches", "training.plan",
    "cross_attention.as_printed", "cross_attention.expected_error",
    "cross_attention.sketch.choose_features", "cross_attention.sketch.even_degree",
    "cross_attention.sketch.sensitivity", "cross_attention.sketch.statistic",
    "cross_attention.trees.choose_features", "cross_attention.trees.statistic",
    "gram.as_printed", "gram.frobenius_sensitivity", "gram.gaussian_entry_error", "gram.max_samples",
    "gram.rounded_sensitivity", "gram.sampling_entry_error", "gram.sampling_epsilon",
    "gram.statistic", "gram.utility_bounds",
    "noise.check_finite", "noise.check_size", "noise.release_integers",
    "noisy_head.as_printed", "noisy_head.calibrate_one_shot", "noisy_head.gradient_sensitivity",
    "noisy_head.hyperparameters", "nn.pretrained.default_path", "nn.pretrained.files", "nn.pretrained.load",
    "nn.pretrained.open_checkpoint", "nn.pretrained.padded", "nn.pretrained.save",
    "nn.pretrained.save_gguf", "nn.pretrained.tokenizer",
    "reattention.effective_noise_std", "reattention.token_probabilities",
    "reattention.uniform_probabilities",
}  # fmt: skip


def public_functions():
    """The names of all public functions and layers, without `dpx.`."""
    found = {}

    def walk(module, prefix):
        own = [
            n for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__
        ]
        for name in getattr(module, "__all__", own):
            value = getattr(module, name)
            if isinstance(value, types.ModuleType):
                walk(value, f"{prefix}{name}.")
            elif inspect.isclass(value) and not issubclass(value, nnx.Module):
                continue
            elif callable(value) and not name.startswith("_"):
                found.setdefault(id(value), prefix + name)

    walk(dpx, "")
    walk(clipping, "clipping.")
    return {name for name in found.values() if not name.startswith(HOST_MODULES)}


def test_every_public_function_is_lowered_or_runs_on_the_host():
    lowered = {name.split(" ")[0] for name in CASES}
    assert public_functions() == lowered | ON_HOST
    assert not lowered & ON_HOST


@pytest.mark.quick_cases("noisy_head.predict", "reattention.dense", "gram.project_psd")
@pytest.mark.parametrize("name", CASES)
def test_it_is_lowered_for_gpus_and_tpus(name):
    with jax.enable_x64(name in WIDE):
        function, *arguments = CASES[name]()
        exported = jax.export.export(jax.jit(function), platforms=PLATFORMS)(*arguments)
    assert exported.platforms == PLATFORMS
    # TPUs compute in 64 bits only in software, if at all.
    assert ("f64" in exported.mlir_module()) == (name in WIDE)
