"""Clipped and noisy sums on eight devices: prints, for each case, errors and what the devices exchange.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/mesh_cases.py quick    # another of CASES

A program of its own, because JAX counts the devices of a process once.
`tests/clipping/test_clipping_meshes.py` runs it and says what must hold.
"""

import contextlib
import functools
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpx

BATCH, CLIP = 16, 0.5
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit, "shard_map": AxisType.Auto}
TENSOR_PARALLEL = {
    "kernel": P(),
    "embed": P("model", None),
    "up": P(None, "model"),
    "bias": P("model"),
    "down": P("model", None),
    "stack": P(None, None, "model"),
}
FSDP = {name: P("model") if name != "kernel" else P() for name in TENSOR_PARALLEL}
REPLICATED = dict.fromkeys(TENSOR_PARALLEL, P())
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=QUICK)


@jax.custom_vjp
def product(x, w):
    """As quantised products have it, its derivative is written by hand."""
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, (g.T @ kept[0]).T))


def loss(params, image, tokens, key):
    """A convolution, a tied embedding whose gradient is kept as factors, layers, a stack of them, dropout."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(
        image[None], params["kernel"], (2, 2), "SAME", dimension_numbers=numbers
    )
    x = jax.nn.relu(x[0]).mean((0, 1)) + params["embed"][tokens]
    x = x * jax.random.bernoulli(key, 0.8, x.shape)
    x = x + product(jnp.tanh(x @ params["up"] + params["bias"]), params["down"])
    for i in range(2):
        x = x + jnp.tanh(x @ params["stack"][i]) @ params["stack"][i].T / 8
    scores = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.take_along_axis(scores[:-1], tokens[1:, None], 1).mean()


def inputs():
    rng = np.random.default_rng(0)
    shapes = {"kernel": (3, 3, 3, 32), "embed": (96, 32), "up": (32, 64), "down": (64, 32)}
    shapes["stack"] = 2, 32, 64
    params = {name: rng.normal(size=s) / math.sqrt(s[-2]) for name, s in shapes.items()}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params | {"bias": np.zeros(64)})
    images = rng.normal(size=(BATCH, 12, 12, 3)).astype("f4")
    images[6] = np.nan  # adds nothing, and everything is run again
    tokens = rng.integers(0, 96, (BATCH, 6))
    keys = jax.random.split(jax.random.key(1), BATCH)
    mask = np.arange(BATCH) != 9
    return params, (images, tokens, keys, mask)


@functools.cache
def expected(trained=("bias", "down", "embed", "kernel", "stack", "up")):
    """The sum and the norms from per-example gradients, who counts, and what one device makes of it.

    Of the parameters with these names.
    """
    params, (*batch, mask) = inputs()
    good = mask & np.isfinite(batch[0]).all((1, 2, 3))
    rows = jit(jax.vmap(jax.grad(loss), (None, 0, 0, 0)))(params, *(x[good] for x in batch))
    rows = {name: np.asarray(rows[name], np.float64) for name in trained}
    norms = np.sqrt(sum((g**2).sum(tuple(range(1, g.ndim))) for g in rows.values()))
    sums = {k: np.tensordot(np.minimum(1, CLIP / norms), g, 1) for k, g in rows.items()}
    wrt = {name: name in trained for name in params}
    gradient = dpx.clipped_grad(loss, l2_clip_norm=CLIP, wrt=wrt)
    one = jit(lambda *a, mask: gradient(*a, mask=mask))(params, *batch, mask=mask)
    return sums, norms, good, one


def relative(got, want):
    whole = math.sqrt(sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(want)))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs) / whole


def exchanged(text):
    """Elements of the numbers that each kind of collective produces, the largest first."""
    found = {}
    for line in text.splitlines():
        if m := re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line):
            shapes = re.findall(r"[a-z]+\d+\[([\d,]*)\]", m[1])
            sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
            found.setdefault(m[2], []).extend(sizes)
    return {name: sorted(sizes, reverse=True) for name, sizes in found.items()}


def on_eight(kind="automatic"):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(KINDS[kind],) * 2)


def lie(found, laid_out):
    """Whether arrays lie where they should."""
    return all(x.sharding.is_equivalent_to(laid_out[name], x.ndim) for name, x in found.items())


def sums_on(kind, layout, gradient):
    """A jitted function of (params, *batch), and where its arguments live."""

    def run(params, *batch):
        found = gradient(params, *batch[:-1], mask=batch[-1])
        return found.grads, found.norms, found.losses

    mesh = on_eight(kind)
    rows = NamedSharding(mesh, P("data"))
    laid_out = {name: NamedSharding(mesh, spec) for name, spec in layout.items()}
    if kind == "shard_map":

        def by_shard(*arguments):
            sums, norms, losses = run(*arguments)
            return jax.lax.psum(sums, "data"), norms, losses

        specs = (P(), *(P("data") for _ in range(4)))
        spread = jax.shard_map(
            by_shard,
            mesh=mesh,
            in_specs=specs,
            out_specs=(P(), P("data"), P("data")),
            axis_names={"data"},
        )
    else:
        spread = run
    outputs = None if kind == "explicit" else (laid_out, rows, rows)
    return mesh, jit(spread, out_shardings=outputs), laid_out, rows


def compare(kind, layout, **settings):
    params, batch = inputs()
    gradient = dpx.clipped_grad(loss, l2_clip_norm=CLIP, **settings)
    trained = gradient.trained(params)
    trained = tuple(sorted(name for name, leaf in trained.items() if leaf is not None))
    sums, norms, good, one = expected(trained)
    mesh, fn, laid_out, rows = sums_on(kind, layout, gradient)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, laid_out)
        batch = jax.device_put(batch, rows)
        program = fn.lower(params, *batch).compile()
        found = program(params, *batch)
    as_asked = lie({name: found[0][name] for name in trained}, laid_out)
    spread = all(x.sharding.is_equivalent_to(rows, 1) for x in found[1:])
    return {
        "error": relative(found[0], sums),
        "norms": float(np.abs(np.asarray(found[1])[good] / norms - 1).max()),
        "left out": np.asarray(found[1])[~good].tolist(),
        "from one device": relative(found[0], one.grads),
        "losses from one device": float(np.nanmax(np.abs(np.asarray(found[2]) - one.losses))),
        "laid out": as_asked and spread,
        "exchanged": exchanged(program.as_text()),
    }


def by_pmap():
    params, batch = inputs()
    sums, *_ = expected()

    def run(*batch):
        gradient = dpx.clipped_grad(loss, l2_clip_norm=CLIP)
        return jax.lax.psum(gradient(params, *batch[:-1], mask=batch[-1]).grads, "data")

    shards = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
    found = jax.tree.map(lambda x: x[0], jax.pmap(run, "data")(*shards))
    return {"error": relative(found, sums)}


def unsummed():
    """Inside shard_map, what devices did not add up must not pass for the sum, nor get one noise for all."""
    params, batch = inputs()
    mesh = on_eight()
    private = dpx.privatize(
        l2_clip_norm=CLIP, noise_multiplier=1.0, expected_batch_size=BATCH, key=jax.random.key(0)
    )

    def noisy(params, *batch):
        found = dpx.clipped_grad(loss, l2_clip_norm=CLIP)(params, *batch[:-1], mask=batch[-1])
        return private.update(found, private.init(params))[0]

    specs = (P(), *(P("data") for _ in batch))
    try:
        jax.eval_shape(
            jax.shard_map(noisy, mesh=mesh, in_specs=specs, out_specs=P()), params, *batch
        )
    except ValueError as error:
        return str(error)
    return "no error"


def closed_over():
    """Where the loss closes over a number that devices have of their own, each clips what it finds itself."""
    mesh = on_eight()
    rng = np.random.default_rng(2)
    w, x, scales = rng.normal(size=(3, 4)), rng.normal(size=(BATCH, 3)), np.array([0.5, 2.0])

    def of_scale(scale):
        return lambda w, x: jnp.sum(jnp.tanh(scale * (x @ w)))

    def by_shard(w, x, scale):
        return dpx.clipped_grad(of_scale(scale[0]), l2_clip_norm=CLIP)(w, x).grads[None, None]

    specs = P(), P("data"), P("model")
    spread = jax.shard_map(by_shard, mesh=mesh, in_specs=specs, out_specs=P("data", "model"))
    found = jit(spread)(*(jnp.asarray(a, jnp.float32) for a in (w, x, scales)))
    rows = [jax.vmap(jax.grad(of_scale(c)), (None, 0))(w, x) for c in scales]
    factors = [jnp.minimum(1, CLIP / jnp.linalg.norm(g, axis=(1, 2))) for g in rows]
    sums = [
        (f[:, None, None] * g).reshape(4, -1, *w.shape).sum(1)
        for f, g in zip(factors, rows, strict=True)
    ]
    return {"error": relative(found, jnp.stack(sums, 1))}


def noise_on(kind):
    """Noise of sharded parameters, against that of one device, bit by bit."""
    params, _ = inputs()
    layout = TENSOR_PARALLEL | {"embed": P("data", "model")}
    mesh = on_eight(kind)
    laid_out = {name: NamedSharding(mesh, spec) for name, spec in layout.items()}
    private = dpx.privatize(
        l2_clip_norm=CLIP, noise_multiplier=1.3, expected_batch_size=BATCH, key=jax.random.key(5)
    )

    def update(sums):
        return private.update(sums, private.init(sums))[0]

    counted, jax.device_count = jax.device_count, lambda: 1  # the draw of a machine with one
    one = jit(update)(params)
    jax.device_count = counted
    with jax.set_mesh(mesh):
        spread = jax.device_put(params, laid_out)
        program = jit(update).lower(spread).compile()
        found = program(spread)
    return {
        "equal": all(np.array_equal(found[name], one[name]) for name in params),
        "noise": float((np.asarray(found["embed"]) * BATCH - params["embed"]).std()),
        "laid out": lie(found, laid_out),
        "exchanged": exchanged(program.as_text()),
    }


def ordinary():
    """What a step of ordinary training exchanges on automatic axes."""
    params, (*batch, _) = inputs()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def mean(params, *batch):
        return jax.vmap(loss, (None, 0, 0, 0))(params, *batch).mean()

    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    return exchanged(jit(jax.grad(mean)).lower(params, *batch).compile().as_text())


def on_four(losses, params, batch, kind="automatic"):
    """Errors of clipped sums of some losses, by their names, where four devices share the batch."""
    kinds, errors = (KINDS[kind],), {}
    mesh = jax.make_mesh((4,), ("data",), axis_types=kinds, devices=jax.devices()[:4])
    sharded = jax.device_put(batch, NamedSharding(mesh, P("data")))
    replicated = jax.device_put(params, NamedSharding(mesh, P()))
    for name, loss in losses.items():
        each = [jax.grad(loss)(params, *one) for one in zip(*batch, strict=True)]
        expected = sum(g * min(1, CLIP / (float(jnp.linalg.norm(g)) + 1e-30)) for g in each)
        for method in ("auto", "vmap"):
            gradient = jax.jit(dpx.clipped_grad(loss, l2_clip_norm=CLIP, method=method))
            with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
                sums = gradient(replicated, *sharded).grads
            errors[f"{name}, {method}"] = relative(sums, expected)
    return errors


def part_of_a_table():
    """Look-ups in a part of a table: which rows these are is known before anything lies on devices."""
    rng = np.random.default_rng(0)
    table, rows = (
        jnp.asarray(rng.normal(size=(12, 4)), "f4"),
        jnp.asarray(rng.integers(0, 10, (8, 3))),
    )
    return on_four({"part": lambda p, i: jnp.sum(jnp.tanh(p[2:][i]))}, table, [rows], "explicit")


def own_kernels():
    """Convolutions with kernels of the examples' own: XLA optimizes the gradients of `vmap(grad)` wrongly."""
    rng = np.random.default_rng(0)
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    rows = rng.normal(size=(8, 12, 12, 3)), rng.normal(size=(8, 3, 3, 5, 5)) / 5
    params, batch = rng.normal(size=(3, 3, 3, 5)) / 5, [jnp.asarray(x, "f4") for x in rows]

    def loss(p, x, own):
        x = jax.lax.conv_general_dilated(x[None], p, (1, 1), "SAME", **numbers)
        x = jax.lax.conv_general_dilated(jnp.tanh(x), own, (2, 2), "SAME", **numbers)
        return jnp.sum(jnp.sin(x))

    return on_four({"own": loss}, jnp.asarray(params, "f4"), batch)


def convolutions_within():
    """The same where a branch, a loop or a rematerialised block makes the gradients of kernels."""
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=(3, 3, 3, 3)) / 5, "f4")
    batch = jnp.asarray(rng.normal(size=(8, 8, 8, 3)), "f4"), jnp.asarray(rng.random(8) > 0.4)

    def layer(p, x):
        # A function of the weights has a gradient that is held.
        numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        y = jax.lax.conv_general_dilated(x[None], jnp.tanh(p), (1, 1), "SAME", **numbers)
        return jnp.tanh(y)[0]

    def scanned(p, x, flag):
        return jax.lax.scan(lambda x, _: (layer(p, x), None), x, None, length=2)[0] * flag

    def from_zeros(p, x, flag):
        """What is convolved in a loop within a block is no value of the example at first."""

        def step(h, _):
            return layer(p, h) + x, None

        start = jnp.zeros(x.shape)
        return jax.checkpoint(lambda: jax.lax.scan(step, start, None, length=3)[0])() * flag

    def looped(p, x, flag):
        def within(_, x):
            return jax.lax.cond(flag, lambda x: layer(p, x), lambda x: 0.5 * x, x)

        return jax.lax.fori_loop(0, 2, within, x)

    def branched(p, x, flag):
        return jax.lax.cond(flag, layer, lambda p, x: 2 * layer(p, x), p, x)

    def rematerialised(p, x, flag):
        return jax.checkpoint(layer)(p, x) * flag

    def summed(made):
        return lambda *given: jnp.sum(jnp.sin(made(*given)))

    made = (branched, scanned, looped, rematerialised, from_zeros)
    return on_four({each.__name__: summed(each) for each in made}, params, batch)


SOME = dict.fromkeys(TENSOR_PARALLEL, False) | {"kernel": True, "up": True}
# By the process that they share, because starting one takes time.
CASES = {
    "quick": {
        "unsummed": unsummed,
        "a part of a table": part_of_a_table,
        "explicit, tensor parallel": lambda: compare(
            "explicit", TENSOR_PARALLEL, microbatch_size=8
        ),
    },
    "convolutions": {"own kernels": own_kernels, "convolutions within": convolutions_within},
    "sums": {
        "shard_map, data": lambda: compare("shard_map", REPLICATED),
        "explicit, data": lambda: compare("explicit", REPLICATED),
        "automatic, data": lambda: compare("automatic", REPLICATED),
        "automatic, microbatches": lambda: compare("automatic", REPLICATED, microbatch_size=8),
        "automatic, FSDP": lambda: compare("automatic", FSDP),
        "explicit, FSDP": lambda: compare("explicit", FSDP, method="vmap"),
        "automatic, tensor parallel": lambda: compare("automatic", TENSOR_PARALLEL),
        "shard_map, tensor parallel": lambda: compare(
            "shard_map", TENSOR_PARALLEL, method="two_pass", microbatch_size=2
        ),
        "explicit, data, some trained": lambda: compare("explicit", REPLICATED, wrt=SOME),
        "explicit, tensor parallel, some trained": lambda: compare(
            "explicit", TENSOR_PARALLEL, wrt=SOME
        ),
    },
    "other": {
        "ordinary": ordinary,
        "pmap": by_pmap,
        "closed over": closed_over,
        "automatic noise": lambda: noise_on("automatic"),
        "explicit noise": lambda: noise_on("explicit"),
    },
}


if __name__ == "__main__":
    print(json.dumps({name: case() for name, case in CASES[sys.argv[1]].items()}))
