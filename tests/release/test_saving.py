"""Every release is saved with its guarantee, and queried by another process; other files are refused."""

import dataclasses
import errno
import json
import subprocess
import sys
import zipfile
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cross_attention_memory import BOX, BUDGET, KEY, memory
from flax import nnx
from flax.core import freeze

import dpx
from dpx import cross_attention, gram, ngram, noisy_head, reattention
from dpx.cross_attention import baselines
from dpx.data import synthetic_histories
from dpx.nn import lora
from dpx.nn.pretrained import Decoder, DecoderSettings
from dpx.recommend import item_gram, popularity, transitions
from dpx.release import encoding, saving

K, V, Q = memory(30, 2, m=5)
HISTORIES = synthetic_histories(40, 6, 8, predictability=0.7, seed=1)
TOKENS = np.random.default_rng(0).integers(0, 4, (20, 6))
TREE = {"weight_bound": 1.0, "bound": 1.0, "bins": 4, **BUDGET}
FEATURES = noisy_head.Features(V.astype(np.float64), K.astype(np.float64), V[:, 0])


def memory_release(**options):
    return lambda: cross_attention.build(KEY, K, V, **BOX, **BUDGET, **options)


# How each release is made, and how another process asks it something.
RELEASES = {
    "sketch": (memory_release(degree=2), lambda r, q: r.query(q)),
    "random features": (
        memory_release(features="random", num_features=8),
        lambda r, q: r.query(q),
    ),
    "trees": (memory_release(mechanism="tree", degree=2, bins=4), lambda r, q: r.query(q)),
    "DPTree": (
        lambda: cross_attention.DPTree.build(KEY, V[:, 0], sensitivity=2.0, **BUDGET),
        lambda r, q: jnp.stack(r.query(q[:, 0])),
    ),
    "DPTreeDistance": (
        lambda: cross_attention.DPTreeDistance.build(KEY, K[:, 0], V[:, 0], **TREE),
        lambda r, q: r.query(q[:, 0]),
    ),
    "DPTreeHighDim": (
        lambda: cross_attention.DPTreeHighDim.build(
            KEY, K, V[:, 0], **{**TREE, "noise": "truncated_laplace"}
        ),
        lambda r, q: r.query(q),
    ),
    "mean of V": (
        lambda: baselines.mean_of_values(KEY, V, value_bound=1.0, **BUDGET),
        lambda r, q: r.values,
    ),
    "Gram": (
        lambda: gram.release(KEY, K.T, column_bound=2.0, **BUDGET),
        lambda r, q: gram.attention(r.matrix),
    ),
    "popularity": (
        lambda: popularity.fit(KEY, HISTORIES, **BUDGET),
        lambda r, q: r.log_probabilities(),
    ),
    "transitions": (
        lambda: transitions.fit(KEY, HISTORIES, num_kept=4, **BUDGET),
        lambda r, q: r.scores([np.array([1, 2])]),
    ),
    "item Gram": (
        lambda: item_gram.fit(KEY, HISTORIES, num_kept=4, **BUDGET),
        lambda r, q: r.matrix,
    ),
    "n-gram": (
        lambda: ngram.fit(
            KEY, TOKENS, TOKENS >= 0, order=2, vocab_size=4, start=0, unit="text", **BUDGET
        ),
        lambda r, q: r.log_prob(TOKENS),
    ),
    "NoisyHead": (
        lambda: noisy_head.fit_one_shot(
            KEY, FEATURES, noisy_head.HyperParameters(1.0, 1.0, 1.0), regularization=0.1, **BUDGET
        ),
        lambda r, q: r.gamma,
    ),
    "token probabilities": (
        lambda: reattention.TokenProbabilities(
            np.linspace(0, 1, 5), gram.release(KEY, K.T, column_bound=2.0, **BUDGET).guarantee
        ),
        lambda r, q: r.values,
    ),
}
ANOTHER_PROCESS = """
import sys
sys.path[:0] = sys.argv[2:]
import numpy as np
import dpx
from test_saving import Q, RELEASES
answers = {}
for number, (name, (_, ask)) in enumerate(RELEASES.items()):
    release = dpx.load(f"{sys.argv[1]}/{number}")
    answers[name] = np.asarray(ask(release, Q))
    answers[name + "/guarantee"] = repr(release.guarantee)
np.savez(f"{sys.argv[1]}/answers.npz", **answers)
"""


class _Made(dict):
    """Each release, made when it is asked for."""

    def __missing__(self, name):
        self[name] = RELEASES[name][0]()
        return self[name]


@pytest.fixture(scope="module")
def releases():
    return _Made()


@pytest.fixture
def saved(tmp_path, releases):
    dpx.save(releases["sketch"], tmp_path / "sketch")
    return tmp_path / "sketch"


@pytest.mark.slow
def test_another_process_loads_and_queries_every_release(releases, tmp_path, request):
    for number, name in enumerate(RELEASES):
        dpx.save(releases[name], tmp_path / str(number))
    where = [str(folder) for folder in (tmp_path, *request.path.parents[:2])]
    subprocess.run([sys.executable, "-c", ANOTHER_PROCESS, *where], check=True)
    answers = np.load(tmp_path / "answers.npz")
    for name, (_, ask) in RELEASES.items():
        want = np.asarray(ask(releases[name], Q))
        assert answers[name].dtype == want.dtype
        np.testing.assert_array_equal(answers[name], want, err_msg=name)
        assert str(answers[f"{name}/guarantee"]) == repr(releases[name].guarantee)
    assert {type(release).__name__ for release in releases.values()} | {"Trained"} == set(
        encoding.RELEASES
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASES)
def test_what_is_loaded_is_what_was_saved(name, releases, tmp_path):
    path = tmp_path / "folder" / "release.any"
    dpx.save(releases[name], path)
    loaded = dpx.load(path)
    assert type(loaded) is type(releases[name])
    assert loaded.guarantee == releases[name].guarantee
    before, after = (jax.tree.flatten(r) for r in (releases[name], loaded))
    assert before[1] == after[1]
    for old, new in zip(before[0], after[0], strict=True):
        assert type(old) is type(new)
        if hasattr(old, "dtype"):
            assert old.dtype == new.dtype
        np.testing.assert_array_equal(old, new)
    assert not list(path.parent.glob("*.partial"))


class Layer(NamedTuple):
    kernel: jax.Array
    bias: np.ndarray


@pytest.mark.slow
def test_a_trained_model_keeps_its_arrays_and_guarantee_and_not_its_losses(tmp_path):
    def loss(model, x, y):
        return jnp.square(model(x) - y).sum()

    trained = dpx.training.fit(
        loss, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), (K, V), epsilon=1.0, delta=1e-3, batch_size=10,
        steps=2, optimizer=optax.sgd(0.1), l2_clip_norm=1.0, key=KEY,
    )  # fmt: skip
    dpx.save(trained, tmp_path / "model.dpx")
    loaded = dpx.load(tmp_path / "model.dpx")
    fresh = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    nnx.update(fresh, loaded.params)
    np.testing.assert_array_equal(fresh(K), trained.params(K))
    assert loaded.guarantee == trained.guarantee
    assert trained.history
    assert not loaded.history


def test_trees_of_parameters_keep_their_shape_and_types():
    params = {
        "layers": [Layer(jnp.ones((2, 3), jnp.bfloat16), np.zeros(3, np.float16))],
        "pair": (np.int64(3), 0.1, float("inf"), float("-inf"), None, True, "text"),
        1: jnp.arange(3),
    }
    arrays = []
    back = encoding.decode(
        json.loads(json.dumps(encoding.encode(params, "params", arrays))), arrays
    )
    assert back["pair"] == params["pair"]
    layer, kept = back["layers"][0], params["layers"][0]
    assert layer._fields == kept._fields
    assert type(layer).__name__ == "Layer"
    for old, new in ((kept.kernel, layer.kernel), (kept.bias, layer.bias), (params[1], back[1])):
        assert (type(old), old.dtype) == (type(new), new.dtype)
        np.testing.assert_array_equal(old, new)
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    arrays = []
    loaded = encoding.decode(encoding.encode(state, "params", arrays), arrays)
    assert jax.tree.structure(nnx.to_pure_dict(loaded)) == jax.tree.structure(
        nnx.to_pure_dict(state)
    )
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    nnx.update(model, loaded)
    np.testing.assert_array_equal(model.kernel[...], state["kernel"][...])


class Popularity(NamedTuple):
    guarantee: str


def test_what_has_the_name_of_a_release_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"Popularity is no release and has no guarantee"):
        dpx.save(Popularity("none"), tmp_path / "x")


@pytest.mark.slow
def test_private_data_and_other_things_are_refused(releases, tmp_path):
    for value in (HISTORIES, noisy_head.Prompts(K, V), FEATURES, {"rows": [HISTORIES]}):
        with pytest.raises(ValueError, match="holds private records"):
            dpx.save(value, tmp_path / "x")
    for value in (K, {"matrix": K}, releases["sketch"].guarantee):
        with pytest.raises(
            ValueError, match=r"is no release and has no guarantee: dpx\.save takes"
        ):
            dpx.save(value, tmp_path / "x")
    for gamma, message in (
        (jax.random.key(0), r"Fit\.gamma is a JAX key"),
        ({"a": [object()]}, r"Fit\.gamma\['a'\]\[0\] is of type object"),
        (np.array([None]), r"Fit\.gamma holds object"),
    ):
        with pytest.raises(ValueError, match=message):
            dpx.save(releases["NoisyHead"]._replace(gamma=gamma), tmp_path / "x")

    def traced(matrix):
        dpx.save(releases["NoisyHead"]._replace(gamma=matrix), tmp_path / "x")

    with pytest.raises(ValueError, match=r"is traced: call dpx\.save outside jit"):
        jax.jit(traced)(K)
    assert not list(tmp_path.iterdir())


def test_files_hold_no_pickle_and_numpy_reads_their_arrays(saved, releases):
    with np.load(saved, allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["0"], releases["sketch"].moments)


def rewritten(path, **changes):
    """The file with other entries in its header, and a checksum that fits them."""
    with zipfile.ZipFile(path) as archive:
        header = json.loads(archive.read("dpx.json"))
        arrays = [archive.read(f"{n}.npy") for n in range(header["arrays"])]
    header = {**header, **changes}
    del header["sha256"]
    header["sha256"] = saving._checksum(header, arrays)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("dpx.json", json.dumps(header))
        for number, array in enumerate(arrays):
            archive.writestr(f"{number}.npy", array)


def refused(path, message):
    with pytest.raises(ValueError, match=message) as error:
        dpx.load(path)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value).splitlines()) == 1


def test_arrays_of_another_release_are_noticed(saved):
    """What an archive says of its own members does not tell: a member may have been replaced with it."""
    with zipfile.ZipFile(saved) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    array = np.load(saved)["0"]
    with zipfile.ZipFile(saved, "w") as archive:
        for name, content in members.items():
            if name != "0.npy":
                archive.writestr(name, content)
        with archive.open("0.npy", "w") as file:
            np.save(file, array + 1)
    refused(saved, "is damaged")


def test_arrays_in_64_bits_come_back_in_64_bits():
    with jax.enable_x64(True):
        wide = jnp.arange(3.0) / 3
    arrays = []
    back = encoding.decode(encoding.encode(wide, "params", arrays), arrays)
    assert back.dtype == jnp.float64
    np.testing.assert_array_equal(np.asarray(back), np.asarray(wide))


def test_damaged_files_are_refused(saved):
    whole = saved.read_bytes()
    for place in range(40, len(whole), 97):
        changed = bytearray(whole)
        changed[place] ^= 1
        saved.write_bytes(changed)
        try:
            loaded = dpx.load(saved)
        except ValueError as error:
            assert str(error).startswith(str(saved))  # noqa: PT017
        else:  # a bit of the archive's own bookkeeping
            saved.write_bytes(whole)
            np.testing.assert_array_equal(loaded.moments, dpx.load(saved).moments)
    for kept in (60, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:kept])
        refused(saved, "is damaged: restore it from a copy")


def test_files_without_some_of_their_bytes_are_damaged(saved):
    """The archive's directory then points to before the start of the file, which made an OSError of it."""
    whole = saved.read_bytes()
    for place in range(60, len(whole) - 40, 211):
        saved.write_bytes(whole[:place] + whole[place + 37 :])
        refused(saved, "is damaged: restore it from a copy")
    encrypted = bytearray(whole)
    encrypted[whole.index(b"PK\x01\x02") + 8] |= 1  # in the directory, the flags of the first file
    saved.write_bytes(encrypted)
    refused(saved, "is damaged: restore it from a copy")


def test_an_error_of_the_disk_is_not_damage(saved, monkeypatch):
    def fail(self, name):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(zipfile.ZipFile, "read", fail)
    with pytest.raises(OSError, match="Input/output error"):
        dpx.load(saved)


def test_foreign_and_newer_files_are_refused(saved, tmp_path):
    np.savez(tmp_path / "other.npz", a=K)
    (tmp_path / "text").write_text("PK, but no archive")
    (tmp_path / "empty").touch()
    for name in ("other.npz", "text", "empty"):
        refused(tmp_path / name, r"is no file of dpx\.save")
    with pytest.raises(FileNotFoundError, match="no such file"):
        dpx.load(tmp_path / "missing")
    rewritten(saved, version=2, dpx="9.9")
    refused(saved, r"was written by dpx 9\.9, which is newer than this one")


@pytest.mark.parametrize(
    "release",
    [
        {"type": "Popen", "fields": {"args": "true"}},
        {"type": "os.system", "fields": {}},
        {"event": "print", "fields": {}},
        {"type": "Sketch", "fields": {"moments": 1}},
        {"unknown": 1},
        {"array": 7, "kind": "jax"},
    ],
)
def test_a_file_cannot_name_what_is_built(saved, release):
    rewritten(saved, release=release)
    refused(saved, "cannot build")


def trained(params):
    return dpx.training.Trained(params, dpx.PrivacyGuarantee(
        1.0, 1e-3, "add_or_remove_one", "record", "DP-SGD"
    ), [])  # fmt: skip


class Own(nnx.LoRAParam):
    """A type that a user made."""


class Tuned(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.lora = nnx.LoRA(2, 1, 3, rngs=rngs)
        self.own = Own(jax.random.normal(rngs.params(), (3,)))
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs)])

    def __call__(self, x):
        return self.layers[0](self.norm(self.lora(x) + self.own[...]))


def equinox_model(seed):
    return eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(seed))


@dataclasses.dataclass(frozen=True)
class Scaled:
    scale: jax.Array
    shift: dict


jax.tree_util.register_dataclass(Scaled, ["scale", "shift"], [])

# What `fit` returns, and how the arrays in it are named.
MODELS = {
    "NNX module": (Tuned, None),
    "NNX state": (lambda seed: nnx.state(Tuned(seed)), None),
    "Equinox": (equinox_model, "layers/0/weight"),
    "dataclass": (lambda seed: Scaled(jnp.full(2, seed), {"a": jnp.full(3, seed)}), "shift/a"),
    "FrozenDict": (lambda seed: freeze({"params": {"w": jnp.full(3, seed)}}), None),
    "modules in a dict": (lambda seed: {"x": Tuned(seed), "y": equinox_model(seed)}, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_come_back_like_a_new_one(name, tmp_path):
    make, array = MODELS[name]
    model = make(1)
    dpx.save(trained(model), tmp_path / "model")
    back = dpx.load(tmp_path / "model", like=make(2))
    assert back.guarantee == trained(model).guarantee
    assert jax.tree.structure(back.params) == jax.tree.structure(make(2))
    assert type(back.params) is type(model)
    wanted = encoding.by_path(model)
    for path, leaf in encoding.by_path(back.params).items():
        if "rngs" not in path:
            np.testing.assert_array_equal(leaf, wanted[path], err_msg=path)
    if array is not None:  # without a model to fill, by name
        plain = dpx.load(tmp_path / "model").params
        assert set(plain) == set(wanted)
        np.testing.assert_array_equal(plain[array], wanted[array])


def test_a_model_that_was_loaded_answers_like_that_which_was_trained(tmp_path):
    model = Tuned(1)
    dpx.save(trained(model), tmp_path / "model")
    back = dpx.load(tmp_path / "model", like=Tuned(2)).params
    np.testing.assert_array_equal(back(K), model(K))
    state = dpx.load(tmp_path / "model").params
    assert isinstance(state["lora"]["lora_a"], nnx.LoRAParam)
    assert type(state["own"]) is nnx.LoRAParam
    fresh = Tuned(3)
    nnx.update(fresh, state)
    np.testing.assert_array_equal(fresh(K), model(K))
    dpx.save(trained(equinox_model(1)), tmp_path / "model")
    back = dpx.load(tmp_path / "model", like=equinox_model(2)).params
    np.testing.assert_array_equal(jax.vmap(back)(K), jax.vmap(equinox_model(1))(K))


def test_no_key_is_saved(tmp_path):
    dpx.save(trained(Tuned(1)), tmp_path / "model")
    secret = nnx.state(Tuned(1))["dropout"]["rngs"]["key"][...]
    with zipfile.ZipFile(tmp_path / "model") as archive:
        words = b"".join(archive.read(name) for name in archive.namelist())
    assert np.asarray(jax.random.key_data(secret)).tobytes() not in words
    with pytest.raises(ValueError, match="is a JAX key, which is a secret"):
        dpx.save(trained(Scaled(jax.random.key(0), {})), tmp_path / "key")
    with pytest.raises(ValueError, match="holds private records"):
        dpx.save(trained(Scaled(jnp.ones(2), {"rows": HISTORIES})), tmp_path / "key")
    assert not (tmp_path / "key").exists()


@pytest.mark.slow
def test_what_is_not_like_the_trained_model_is_named(releases, tmp_path):
    path = tmp_path / "model"
    dpx.save(trained({"a": jnp.ones(2), "b": jnp.ones(3)}), path)
    for like, named in (
        ({"a": jnp.ones(2)}, "like has no array b"),
        ({"a": jnp.ones(2), "b": jnp.ones(4)}, r"like has b of shape \(4,\), and \(3,\) was saved"),
        ({"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1)}, "like has an array c, which was"),
    ):
        with pytest.raises(ValueError, match=named):
            dpx.load(path, like=like)
    dpx.save(releases["NoisyHead"], path)
    with pytest.raises(ValueError, match=r"like must be left out: .* holds a Fit"):
        dpx.load(path, like={"a": jnp.ones(2)})


@pytest.mark.slow
def test_the_documented_training_of_adapters_is_saved(tmp_path):
    model = Decoder(DecoderSettings(5, dim=8, num_layers=1, num_heads=2), rngs=nnx.Rngs(0))
    lora.attach(model, rank=1)
    graph, params = nnx.split(model)

    def loss(params, tokens):
        return -jax.nn.log_softmax(nnx.merge(graph, params)(tokens))[0, 0]

    tuned = dpx.training.fit(
        loss, params, TOKENS, epsilon=1.0, delta=1e-3, batch_size=10, steps=1, wrt=nnx.LoRAParam,
        optimizer=optax.sgd(0.1), l2_clip_norm=1.0, key=dpx.secret_key(),
    )  # fmt: skip
    dpx.save(tuned, tmp_path / "tuned")
    back = dpx.load(tmp_path / "tuned", like=model).params
    np.testing.assert_array_equal(back(TOKENS), nnx.merge(graph, tuned.params)(TOKENS))
