"""What `fit` refuses: each call is one line that names the argument, before there is a folder."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib
from training_cases import PARAMS, USERS, X, Y, fit, loss_fn, secure

import dpx
from dpx.training import AdaptiveClipNorm, Allocation, Poisson, loop
from dpx.training import keys as secrets

BANDED = {"noise": "banded", "bands": 3}
WHOSE = {"users": USERS, "records_per_user": 4, "batch_size": 4}
NORM = nnx.BatchNorm(3, rngs=nnx.Rngs(0))


def private():
    return dpx.privatize(
        l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=16, key=dpx.secret_key()
    )


def normed(module):
    """A loss in which an example is normalized by others of its batch."""
    return lambda params, x, y: module(x[None]).sum() + loss_fn(params, x, y)


NUMBERS = [
    ({"epsilon": 0.0}, "epsilon=0.0 must be in"),
    ({"delta": 1.0}, "delta=1.0 must be in"),
    ({"batch_size": 101}, "batch_size=101 must be positive and at most 100"),
    ({"batch_size": 0}, "batch_size=0 must"),
    ({"steps": 2.5}, "steps=2.5 must be a whole number"),
    ({"microbatch_size": 0}, "microbatch_size=0 must"),
    ({"log_every": 0}, "log_every=0 must"),
    ({"accountant": "moments"}, "accountant='moments' is not known"),
    ({"compute_dtype": "float16"}, r"compute_dtype=.* must be one of .'bfloat16', 'float32'"),
    ({"compute_dtype": "half of it"}, r"compute_dtype=.* must be one of .'bfloat16', 'float32'"),
    ({"compute_dtype": 16}, r"compute_dtype=.* must be one of .'bfloat16', 'float32'"),
    ({"label": "../up"}, r"label='\.\./up' must be a plain name"),
    ({"label": ".."}, r"label='\.\.' must be a plain name"),
    ({"label": 3}, "label=3 must be a plain name"),
    ({"label": "ä" * 101}, "has 202 bytes, which must be at most 200"),
    ({"assumptions": "nobody looks"}, "must be a tuple of sentences"),
    ({"assumptions": (3,)}, "must be a tuple of sentences"),
    ({"normalize": "yes"}, "normalize='yes' must be True or False"),
    ({"record_key": 1}, "record_key=1 must be True or False"),
    ({"progress": 0}, "progress=0 must be True or False"),
    ({"secure": "yes"}, "secure='yes' must be"),
    ({"evaluate": 3}, "evaluate=3 must be a function"),
]
CLIPS = [
    ({"l2_clip_norm": -1.0}, "l2_clip_norm=-1.0 must"),
    (
        {"l2_clip_norm": AdaptiveClipNorm(count_noise=0.01), "epsilon": 1.0},
        "count_noise=0.01 must be more than",
    ),
]
KEYS = [
    ({"key": 0}, r"key of type int must be one JAX key: use dpx.secret_key\(\)"),
    ({"key": None}, "key of type NoneType must be one JAX key"),
    ({"key": np.ones(3, np.uint32)}, r"key of type ndarray and shape \(3,\) must be one JAX key"),
    ({"key": jax.random.key(0, impl="rbg")}, "key of the generator rbg must be one of the default"),
    ({"key": np.array([0.3, 0.9])}, "must be one JAX key"),
    ({"key": np.array([1, 2])}, "must be one JAX key"),
    ({"key": jax.random.split(jax.random.key(0), 2)}, "must be one JAX key"),
    ({"secure": True}, "key must be None with secure=True: a JAX key has 64 bits"),
    (
        {"secure": True, "key": secrets.derive(jax.random.key(1 << 40))},
        "key must be None with secure=True",
    ),
    (secure() | {"epsilon": 1e4}, "noise_multiplier=.* must be a number of at least 1/18"),
]
DRAWN = [
    ({"sampling": "shuffle"}, "is not known: use one of auto, poisson, allocation"),
    ({"sampling": 3}, "sampling=3 must be one of"),
    ({"sampling": Allocation}, "must be one of"),
    ({"sampling": Poisson(19)}, "max_batch_size=19 must be at least 20, the expected size"),
    ({"sampling": Poisson(30), "accountant": "rdp"}, "accountant='rdp' must be 'pld'"),
    (
        {"sampling": "allocation", "accountant": "rdp"},
        "accountant='rdp' must be 'pld' with sampling='allocation'",
    ),
    ({"noise": "pink"}, "noise='pink'"),
    ({"bands": 3}, "bands=3 must come with noise='banded'"),
    ({"noise": "banded"}, "bands=None must be a number with noise='banded'"),
    (BANDED | {"bands": 1}, "bands=1 must be"),
    (BANDED | {"bands": 7, "batch_size": 8}, "bands=7 must be at most 6"),
    (BANDED | {"batch_size": 50}, "bands=3 must be at most 2"),
    (BANDED | {"sampling": Poisson(20)}, "must be 'poisson' or 'auto' with noise='banded'"),
    (BANDED | {"sampling": "allocation"}, "must be 'poisson' or 'auto' with noise='banded'"),
    (BANDED | {"l2_clip_norm": AdaptiveClipNorm()}, "'independent' with an AdaptiveClipNorm"),
]
DATA = [
    ({"params": {}}, "params has no floating-point array"),
    ({"params": nnx.Linear}, "give parameters, or an instance of a model"),
    ({"data": ()}, "data holds no array"),
    ({"data": (X, Y[:50])}, r"data has .*'data\[1\]': 50.* rows"),
    ({"data": [X, Y]}, r"rows of one length: .*, and several arrays go into a tuple, as \(x, y\)"),
    ({"data": (X, 3.0)}, r"data\[1\]=3.0 must be an array"),
    ({"data": ([[1.0], [2.0, 3.0]],)}, r"data\[0\] must be an array, with rows of one length"),
    ({"data": {"x": X, "y": ["a"] * 100}}, r"data\['y'\] has dtype <U1, which must be real"),
    ({"data": (X, np.full(100, 2**31))}, r"data\[1\] holds 2147483648, which int32 does not"),
    ({"data": (X, np.full(100, -(2**40)))}, r"data\[1\] holds -1099511627776, which int32"),
    ({"data": (X, np.full(100, 2**32, np.uint64))}, r"holds 4294967296, which uint32 does not"),
    ({"data": (X[:0], Y[:0])}, "data has no rows"),
    ({"data": (X, [1] * 99 + [0.5])}, r"data\[1\] is a list that holds float64 and int64"),
    (
        {"data": (X, [1] * 99 + [2**63])},
        r"data\[1\] is a list that holds a whole number beyond int64",
    ),
    ({"data": (X, [1] * 99 + [True])}, r"data\[1\] is a list that holds bool and int64"),
    ({"data": [*X, np.zeros(3, np.float64)]}, "data is a list that holds float32 and float64"),
]
OF_USERS = [
    (WHOSE | changes, named)
    for changes, named in [
        ({"users": [*USERS[:5], None, *USERS[6:]]}, "users: row 5 is missing: fill it in"),
        ({"users": [*USERS[:-1], float("nan")]}, "users: row 99 is missing"),
        ({"users": USERS.astype(float)}, r"users: row 0 holds .*ids must be text or whole"),
        ({"users": np.array(["ann", *[" "] * 99])}, "users: row 1 is missing"),
        ({"users": USERS[1:]}, "users has 99 entries and data 100 rows"),
        ({"users": "ann"}, "users='ann' must be a column"),
        ({"users": dict(enumerate(USERS))}, "users is a dict, which must be a sequence"),
        ({"users": np.stack([USERS, USERS])}, "users has shape"),
        ({"users": None}, "records_per_user=4 must come with users="),
        ({"records_per_user": None}, "records_per_user=None must be a number"),
        ({"records_per_user": 0}, "records_per_user=0 must be a whole number"),
        ({"batch_size": 14}, "at most 13, the number of users"),
        ({"loss": lambda p, x, y: x * y + p["b"]}, r"returned an array of shape \(3,\)"),
    ]
]
OPTIMIZERS = [
    ({"optimizer": optimizer}, named)
    for optimizer, named in [
        (0.1, "optimizer=0.1 must be an Optax optimizer"),
        (optax.adam, "must be an Optax optimizer: use one such as"),
        (optax.lbfgs(), r"noisy gradients alone, and failed \(TypeError: .*'value'"),
        (
            optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau()),
            r"noisy gradients alone, and failed \(TypeError: reduce_on_plateau",
        ),
        (optax.polyak_sgd(), r"noisy gradients alone, and failed \(TypeError"),
        (optax.lookahead(optax.sgd(0.1), 3, 0.5), "keeps two copies of the parameters"),
        (contrib.dpsgd(0.1, 1.0, 1.0, 0), "clips and adds noise by itself"),
        (optax.chain(private(), optax.adam(1e-2)), "leave dpx.privatize out"),
        (optax.masked(private(), True), "leave dpx.privatize out"),
        (optax.MultiSteps(optax.adam(1e-2), 2), r"give optimizer\.gradient_transformation\(\)"),
        (
            nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.adam(1e-2), wrt=nnx.Param),
            r"give the one that it was made of, optimizer\.tx",
        ),
    ]
]
LOSSES = [
    ({"loss": loss} | more, named)
    for loss, named, more in [
        (3, "loss_fn=3 must be a function", {}),
        (normed(lambda x: nnx.clone(NORM)(x)), "BatchNorm in training mode", {}),
        (
            lambda model, x, y: model(x)[0],
            "BatchNorm in training mode",
            {"params": nnx.Sequential(NORM, nnx.Linear(3, 1, rngs=nnx.Rngs(0)))},
        ),
        (
            normed(lambda x: jax.lax.pmean(x, "batch")),
            "asks for the axis 'batch'.*GroupNorm",
            {},
        ),
        (
            normed(lambda x: nnx.clone(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))(x)),
            "record_key=True",
            {"strict": True},
        ),
        (lambda p, x, y: (loss_fn(p, x, y), x), "returned a tuple", {}),
        (lambda p, x, y: x * p["w"], r"returned an array of shape \(3,\)", {}),
        (lambda p, x, y: jnp.sum(p["v"]), "v", {}),
        (
            lambda p, x, y: loss_fn(p[0], x, y),
            "params holds a ScaleByAdamState",
            {"params": (PARAMS, optax.adam(1e-3).init(PARAMS))},
        ),
        (
            lambda p, x, y: loss_fn(p.params, x, y),
            r"params is a Trained, .* such as state\.params",
            {"params": dpx.training.Trained(PARAMS, None, [])},  # type: ignore[arg-type]
        ),
    ]
]


@pytest.mark.parametrize(
    ("changes", "named"),
    [*NUMBERS, *CLIPS, *KEYS, *DRAWN, *DATA, *OF_USERS, *OPTIMIZERS, *LOSSES],
)
def test_a_refused_call_is_one_line_before_anything_is_drawn(changes, named, monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "train", lambda *args, **rest: pytest.fail("training began"))
    with pytest.raises((ValueError, KeyError), match=named) as found:
        fit(**changes, workdir=tmp_path / "run")
    assert "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


def test_norms_of_some_parameters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a prefix of the parameter tree"):
        fit(l2_clip_norm={"w": 1.0}, workdir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_secure_training_without_the_library_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[secure\]"'):
        fit(workdir=tmp_path / "run", secure=True, key=None)
    assert not (tmp_path / "run").exists()
