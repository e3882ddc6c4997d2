"""Private training on meshes of eight devices: prints, for each mesh, how far it is from that on one.

A program of its own, because JAX counts the devices of a process once. `tests/training/test_meshes.py` runs
it and says what must hold.
"""

import functools
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
from training_cases import killed_at, secure, seen_steps

import dpx
from dpx.training import AdaptiveClipNorm, Poisson

RECORDS = 101  # which no mesh divides
STEPS = 4
# 24 of 1 to 9 records each, all those of one in the same half.
USERS: dict = {
    "users": [int(i >= 50) * 100 + int(np.sqrt(3 * (i % 50))) for i in range(RECORDS)],
    "records_per_user": 3,
    "batch_size": 8,
}
# Two epochs of two steps.
ALLOCATION: dict = {"sampling": "allocation", "batch_size": RECORDS / 2}
# What the records of several processes are.
UNITS = {"records": {}, "users": USERS, "allocation": ALLOCATION, "secure": {"secure": True}}
BOTH = {"data": 4, "model": 2}
# Half of the samples are cut off. One compiled step takes them all, or it raises.
CUT: dict = {"sampling": Poisson(30)}
NARROW: dict = {"compute_dtype": "bfloat16"}
# Meshes and changes, of trainings whose compiled steps are looked at.
SEEN = {
    "data 2": ({"data": 2}, {}),
    "data 8": ({"data": 8}, {}),
    "data 4, model 2": (BOTH, {}),
    "model 2": ({"model": 2}, {}),
    "cut, data 8": ({"data": 8}, CUT),
}
# The same of other trainings.
OTHERS = {
    "explicit, data 4": ("explicit", {"microbatch_size": 6}),
    "cut, data 4, model 2": (BOTH, CUT | {"microbatch_size": 6}),
    "users, data 4, model 2": (BOTH, USERS),
    "secure": (BOTH, {"secure": True}),
    "secure, users": (BOTH, {"secure": True} | USERS),
    "adaptive": (BOTH, {"l2_clip_norm": AdaptiveClipNorm(count_noise=20.0)}),
    "banded": (BOTH, {"noise": "banded", "bands": 2}),
    "allocation": (BOTH, {"sampling": "allocation"}),
    "bfloat16, data 8": ({"data": 8}, NARROW),
    "bfloat16, data 4, model 2": (BOTH, NARROW),
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
        "log_every": 1,
    }
    settings |= secure() if changes.get("secure") else {}
    return dpx.training.fit(loss_fn, params, data, **settings | changes)


def seen(**changes):
    """A training, what its compiled step exchanges, and among how many devices its arrays are shared."""
    found = {}

    def see(jitted, *arguments):
        if not found:
            found["program"] = jitted.lower(*arguments).compile()
            leaves = [x for x in jax.tree.leaves(arguments[0]) if x.size > 3]
            shards = [x.sharding.shard_shape(x.shape) for x in leaves]
            found["shares"] = [x.size // math.prod(s) for x, s in zip(leaves, shards, strict=True)]
        return found["program"](*arguments)

    with seen_steps(see):
        trained = fit(**changes)
    return trained, {"exchanged": exchanged(found.pop("program").as_text())} | found


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


def moved():
    """A training that is killed on one mesh and goes on on another, under another key."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"workdir": folder, "checkpoint_every": 1}
        with killed_at(3):
            fit(mesh={"data": 4}, **settings)
        return fit(mesh={"data": 2, "model": 2}, **settings | {"key": jax.random.key(4)})


def main():
    ones = {}

    def one(microbatch_size=None, **changes):
        if repr(changes) not in ones:
            ones[repr(changes)] = fit(**changes)
        return ones[repr(changes)]

    plain = one()
    found = {"moved": farthest(plain.params, inputs()[0]), "resumed": compare(moved(), plain)}
    for name, (mesh, changes) in SEEN.items():
        on_mesh, step = seen(mesh=mesh, **changes)
        found[name] = compare(on_mesh, one(**changes)) | step
    for name, (mesh, changes) in OTHERS.items():
        if name == "banded" and not find_spec("jax_privacy"):
            continue
        if mesh == "explicit":
            mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
        on_mesh = fit(mesh=mesh, **changes)
        found[name] = compare(on_mesh, one(**changes))
        found[name]["from float32"] = farthest(on_mesh.params, plain.params)
    noise = functools.partial(fit, nothing, optax.sgd(1.0))
    alone, secure_alone = noise(), noise(secure=True)
    found["noise apart"] = farthest(noise(mesh=BOTH).params, alone.params)
    found["secure noise apart"] = farthest(
        noise(mesh=BOTH, secure=True).params, secure_alone.params
    )
    found["noise of the stream"] = farthest(secure_alone.params, alone.params)
    found["noise"] = farthest(alone.params, inputs()[0])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
