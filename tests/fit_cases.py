"""Private training on meshes of eight devices: prints, for each mesh, how far it is from that on one.

A program of its own, because JAX counts the devices of a process once. `tests/training/test_meshes.py` runs
it and says what must hold.
"""

import json
import math
import sys
import tempfile
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from mesh_cases import exchanged

import dpx
from dpx.training import AdaptiveClipNorm, Poisson, loop
from dpx.training.log import Progress

RECORDS = 101  # which no mesh divides
STEPS = 4
# 24 of 1 to 9 records each, all those of one in the same half.
USERS: dict = {
    "users": [int(i >= 50) * 100 + int(np.sqrt(3 * (i % 50))) for i in range(RECORDS)],
    "records_per_user": 3,
    "batch_size": 8,
}


def secure(secret=b"s" * 32):
    """What makes a training draw from a cryptographic stream, under a secret."""
    keys = dpx.training.Keys(jax.random.key(3), np.random.SeedSequence(3), secret)
    return {"secure": True, "key": keys}


# Two epochs of two steps.
ALLOCATION: dict = {"sampling": "allocation", "batch_size": RECORDS / 2}
MESHES = {
    "data 2": {"data": 2},
    "data 8": {"data": 8},
    "data 4, model 2": {"data": 4, "model": 2},
    "model 2": {"model": 2},
}


def loss(params, tokens, target, key):
    """An embedding, dropout, a scan whose carry begins as a constant, and a bias that no axis divides."""
    x = params["embed"][tokens] * jax.random.bernoulli(key, 0.8, (6, 16))
    step = lambda carry, row: (jnp.tanh(carry + row @ params["mix"]), ())  # noqa: E731
    last, _ = jax.lax.scan(step, jnp.zeros(16), x)
    scores = last @ params["embed"].T + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, target)


def nothing(params, tokens, target):
    """A loss without gradient: what is learned is the noise."""
    return 0 * params["embed"][tokens].sum() + 0 * params["mix"].sum() + 0 * params["bias"].sum()


def inputs():
    rng = np.random.default_rng(0)
    shapes = {"embed": (48, 16), "mix": (16, 16), "bias": (48,)}
    params = {name: 0.3 * rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    data = rng.integers(0, 48, (RECORDS, 6)), rng.integers(0, 48, RECORDS)
    return params | {"odd": np.ones(3, "f4")}, data


def fit(loss_fn=loss, optimizer=optax.sgd(0.1, momentum=0.9), data=None, **changes):  # noqa: B008
    params, everything = inputs()
    data = everything if data is None else data
    settings = {
        "epsilon": 4.0,
        "delta": 1e-3,
        "batch_size": 30,
        "sampling": "poisson",
        "steps": STEPS,
        "l2_clip_norm": 0.5,
        "optimizer": optimizer,
        "key": jax.random.key(3),
        "record_key": loss_fn is loss,
    }
    return dpx.training.fit(loss_fn, params, data, **settings | changes)


def seen(**changes):
    """A training, its compiled step, and among how many devices each array of its state is shared."""
    jit, found = jax.jit, {}

    def recording(function, **settings):
        jitted = jit(function, **settings)
        if getattr(function, "func", None) is not loop._step:
            return jitted

        def run(*arguments):
            if not found:
                found["program"] = jitted.lower(*arguments).compile()
                leaves = [x for x in jax.tree.leaves(arguments[0]) if x.size > 3]
                shards = [x.sharding.shard_shape(x.shape) for x in leaves]
                found["shares"] = [
                    x.size // math.prod(s) for x, s in zip(leaves, shards, strict=True)
                ]
            return found["program"](*arguments)

        return run

    jax.jit = recording
    try:
        return fit(**changes), found
    finally:
        jax.jit = jit


def farthest(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


def compare(found, one):
    return {
        "apart": farthest(found.params, one.params),
        "losses apart": max(
            abs(a.loss - b.loss) for a, b in zip(found.history, one.history, strict=True)
        ),
        "same guarantee": found.guarantee == one.guarantee,
    }


def killed_at(step, **changes):
    line = Progress.line

    def stop(self, done, *rest):
        if done == step:
            raise KeyboardInterrupt
        line(self, done, *rest)

    Progress.line = stop
    try:
        fit(**changes)
    except KeyboardInterrupt:
        pass
    finally:
        Progress.line = line


def moved(begun, resumed):
    """A training that is killed on one mesh and goes on on another, under another key."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"workdir": folder, "log_every": 1, "checkpoint_every": 1}
        killed_at(3, mesh=begun, **settings)
        return fit(mesh=resumed, **settings | {"key": jax.random.key(4)})


def main():
    one = fit(log_every=1)
    found = {"moved": farthest(one.params, inputs()[0])}
    for name, mesh in MESHES.items():
        on_mesh, step = seen(mesh=mesh, log_every=1)
        about = {"exchanged": exchanged(step["program"].as_text()), "shares": step["shares"]}
        found[name] = compare(on_mesh, one) | about
    explicit = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    found["explicit, data 4"] = compare(fit(mesh=explicit, microbatch_size=6, log_every=1), one)
    spread = fit(mesh={"data": 4, "model": 2}, log_every=1, **USERS)
    found["users, data 4, model 2"] = compare(spread, fit(log_every=1, **USERS))
    of_mesh = {"mesh": {"data": 4, "model": 2}}
    for name, more in (("secure", {}), ("secure, users", USERS)):
        spread = fit(log_every=1, **secure(), **of_mesh, **more)
        found[name] = compare(spread, fit(log_every=1, **secure(), **more))
    found["resumed"] = compare(moved({"data": 4}, {"data": 2, "model": 2}), one)
    # Half of the samples are cut off. One compiled step takes them all, or it raises.
    cut = {"sampling": Poisson(30), "log_every": 1}
    on_mesh, step = seen(mesh={"data": 8}, **cut)
    about = {"exchanged": exchanged(step["program"].as_text()), "shares": step["shares"]}
    found["cut, data 8"] = compare(on_mesh, fit(**cut)) | about
    sharing = {"mesh": {"data": 4, "model": 2}, "microbatch_size": 6, **cut}
    found["cut, data 4, model 2"] = compare(fit(**sharing), fit(**cut))
    narrow = {"compute_dtype": "bfloat16", "log_every": 1}
    for name in ("data 8", "data 4, model 2"):
        on_mesh = fit(mesh=MESHES[name], **narrow)
        found[f"bfloat16, {name}"] = compare(on_mesh, fit(**narrow)) | {
            "from float32": farthest(on_mesh.params, one.params)
        }
    for name, more in {
        "adaptive": {"l2_clip_norm": AdaptiveClipNorm(count_noise=20.0), "log_every": 1},
        "banded": {"noise": "banded", "bands": 2, "log_every": 1},
        "allocation": {"sampling": "allocation", "log_every": 1},
    }.items():
        if name != "banded" or find_spec("jax_privacy"):
            found[name] = compare(fit(mesh=MESHES["data 4, model 2"], **more), fit(**more))
    alone = fit(nothing, optax.sgd(1.0))
    spread = fit(nothing, optax.sgd(1.0), mesh={"data": 4, "model": 2})
    found["noise apart"] = farthest(spread.params, alone.params)
    alone_secure = fit(nothing, optax.sgd(1.0), **secure())
    spread = fit(nothing, optax.sgd(1.0), **secure(), **of_mesh)
    found["secure noise apart"] = farthest(spread.params, alone_secure.params)
    found["noise of the stream"] = farthest(alone_secure.params, alone.params)
    found["noise"] = farthest(alone.params, inputs()[0])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
