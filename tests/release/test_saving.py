"""Every release is saved with its guarantee, and queried by another process; other files are refused."""

import dataclasses
import errno
import json
import zipfile
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command_line import python
from flax import nnx
from flax.core import freeze
from own_runs import plain
from release_cases import BUDGET, KEY, KEYS, PROMPTS, RELEASES, TOKENS, histories, made, records_of

import dpx
from dpx import cross_attention, gram, noisy_head, reattention
from dpx.cross_attention import baselines
from dpx.nn import lora
from dpx.nn.pretrained import Decoder, DecoderSettings
from dpx.release import encoding, saving

HISTORIES = histories([0, 1, 2])
K = KEYS.astype(np.float32)
MATRIX = K.T  # its columns are records
# Releases that are no sums over blocks.
OTHERS = {
    "mean of V": lambda: baselines.mean_of_values(KEY, K, value_bound=1.0, **BUDGET),
    "DPTree": lambda: cross_attention.DPTree.build(KEY, K[:, 0], sensitivity=2.0, **BUDGET),
    "token probabilities": lambda: reattention.TokenProbabilities(
        np.linspace(0, 1, 5), gram.release(KEY, MATRIX, column_bound=2.0, **BUDGET).guarantee
    ),
}
ANOTHER_PROCESS = """
import sys
import jax
import dpx
for number in range(int(sys.argv[2])):
    release = dpx.load(f"{sys.argv[1]}/{number}")
    dpx.save(release, f"{sys.argv[1]}/{number} again")
    print(repr(release.guarantee))
"""


class _Made(dict):
    """Each release, made when it is asked for."""

    def __missing__(self, name):
        if name in OTHERS:
            self[name] = OTHERS[name]()
        else:
            self[name] = made(name, records_of(name), **BUDGET)
        return self[name]


@pytest.fixture(scope="module")
def releases():
    return _Made()


@pytest.fixture
def saved(tmp_path, releases):
    dpx.save(releases["sketch"], tmp_path / "sketch")
    return tmp_path / "sketch"


@pytest.mark.slow
def test_what_another_process_loads_is_what_was_saved(releases, tmp_path):
    names, where = [*RELEASES, *OTHERS], tmp_path / "folder"
    for number, name in enumerate(names):
        dpx.save(releases[name], where / str(number))
    said = python("-c", ANOTHER_PROCESS, where, len(names)).stdout.splitlines()
    assert said == [repr(releases[name].guarantee) for name in names]
    for number, name in enumerate(names):
        loaded = dpx.load(where / f"{number} again")
        assert type(loaded) is type(releases[name])
        assert loaded.guarantee == releases[name].guarantee
        before, after = (jax.tree.flatten(r) for r in (releases[name], loaded))
        assert before[1] == after[1]
        for old, new in zip(before[0], after[0], strict=True):
            assert type(old) is type(new)
            assert getattr(old, "dtype", None) == getattr(new, "dtype", None)
            np.testing.assert_array_equal(old, new, err_msg=name)
    sketch = dpx.load(where / f"{names.index('sketch')} again")
    np.testing.assert_array_equal(sketch.query(K), releases["sketch"].query(K))
    assert not list(where.glob("*.partial"))
    kinds = {type(release).__name__ for release in releases.values()}
    assert kinds | {"Trained"} == set(encoding.RELEASES)


def there_and_back(value):
    arrays = []
    encoded = json.dumps(encoding.encode(value, "params", arrays))
    return encoding.decode(json.loads(encoded), arrays)


class Layer(NamedTuple):
    kernel: jax.Array
    bias: np.ndarray


def test_trees_of_parameters_keep_their_shape_and_types():
    params = {
        "layers": [Layer(jnp.ones((2, 3), jnp.bfloat16), np.zeros(3, np.float16))],
        "pair": (np.int64(3), 0.1, float("inf"), float("-inf"), None, True, "text"),
        1: jnp.arange(3),
    }
    back = there_and_back(params)
    assert back["pair"] == params["pair"]
    layer, kept = back["layers"][0], params["layers"][0]
    assert layer._fields == kept._fields
    assert type(layer).__name__ == "Layer"
    for old, new in ((kept.kernel, layer.kernel), (kept.bias, layer.bias), (params[1], back[1])):
        assert (type(old), old.dtype) == (type(new), new.dtype)
        np.testing.assert_array_equal(old, new)
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    loaded = there_and_back(state)
    one, other = (jax.tree.structure(nnx.to_pure_dict(s)) for s in (loaded, state))
    assert one == other
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    nnx.update(model, loaded)
    np.testing.assert_array_equal(model.kernel[...], state["kernel"][...])


class Popularity(NamedTuple):
    guarantee: str


@pytest.mark.slow
def test_private_data_and_other_things_are_refused(releases, tmp_path):
    fit, bare = releases["NoisyHead"], r"is no release and has no guarantee: dpx\.save takes"

    def save(value):
        dpx.save(value, tmp_path / "x")

    for value, said in (
        *((data, "holds private records") for data in (HISTORIES, PROMPTS, {"a": [HISTORIES]})),
        (noisy_head.Prompts(K, K), "holds private records"),
        *((value, bare) for value in (K, {"matrix": K}, releases["sketch"].guarantee)),
        (Popularity("of another type"), f"Popularity {bare}"),
        (fit._replace(gamma=jax.random.key(0)), r"Fit\.gamma is a JAX key"),
        (fit._replace(gamma={"a": [object()]}), r"Fit\.gamma\['a'\]\[0\] is of type object"),
        (fit._replace(gamma=np.array([None])), r"Fit\.gamma holds object"),
    ):
        with pytest.raises(ValueError, match=said):
            save(value)
    with pytest.raises(ValueError, match=r"is traced: call dpx\.save outside jit"):
        jax.jit(lambda matrix: save(fit._replace(gamma=matrix)))(K)
    assert not list(tmp_path.iterdir())


def test_files_hold_no_pickle_and_numpy_reads_their_arrays(saved, releases):
    with np.load(saved, allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["0"], releases["sketch"].moments)


def members(path):
    """The header of a file, and its arrays."""
    with zipfile.ZipFile(path) as archive:
        header = json.loads(archive.read("dpx.json"))
        return header, [archive.read(f"{n}.npy") for n in range(header["arrays"])]


def rewrite(path, header, arrays):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("dpx.json", json.dumps(header))
        for number, array in enumerate(arrays):
            archive.writestr(f"{number}.npy", array)


def with_header(path, **changes):
    """Rewrites a file with other entries in its header, and a checksum that fits them."""
    header, arrays = members(path)
    del header["sha256"]
    header |= changes
    rewrite(path, {**header, "sha256": saving._checksum(header, arrays)}, arrays)


def refused(path, message):
    with pytest.raises(ValueError, match=message) as error:
        dpx.load(path)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value).splitlines()) == 1


def test_arrays_of_another_release_are_noticed(saved):
    """What an archive says of its own members does not tell: a member may have been replaced with it."""
    header, arrays = members(saved)
    rewrite(saved, header, [array[:-1] + bytes([array[-1] ^ 1]) for array in arrays])
    refused(saved, "is damaged")


def test_arrays_in_64_bits_come_back_in_64_bits():
    with jax.enable_x64(True):
        wide = jnp.arange(3.0) / 3
    back = there_and_back(wide)
    assert back.dtype == jnp.float64
    np.testing.assert_array_equal(np.asarray(back), np.asarray(wide))


def test_damaged_files_are_refused(saved):
    whole, bare = saved.read_bytes(), "is damaged: restore it from a copy"
    sound = dpx.load(saved)
    for place in range(40, len(whole), 97):
        changed = bytearray(whole)
        changed[place] ^= 1
        saved.write_bytes(changed)
        try:
            np.testing.assert_array_equal(dpx.load(saved).moments, sound.moments)
        except ValueError as error:  # else a bit of the archive's own bookkeeping
            assert str(error).startswith(str(saved))  # noqa: PT017
    for kept in (60, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:kept])
        refused(saved, bare)
    # The archive's directory then points to before the start of the file, which made an OSError of it.
    for place in range(60, len(whole) - 40, 211):
        saved.write_bytes(whole[:place] + whole[place + 37 :])
        refused(saved, bare)
    encrypted = bytearray(whole)
    encrypted[whole.index(b"PK\x01\x02") + 8] |= 1  # in the directory, the flags of the first file
    saved.write_bytes(encrypted)
    refused(saved, bare)


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
    with_header(saved, version=2, dpx="9.9")
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
    with_header(saved, release=release)
    refused(saved, "cannot build")


def trained(params):
    return dpx.training.Trained(params, plain(), [])


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


def test_arrays_whose_paths_print_alike_are_not_saved_as_one(tmp_path):
    model = Scaled(jnp.ones(2), {"a/b": jnp.ones(2), "a": {"b": jnp.zeros(2)}})
    with pytest.raises(ValueError, match="shift/a/b must be the path of one array"):
        dpx.save(trained(model), tmp_path / "model")


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
    for sizes, named in (
        ({"a": 2}, "like has no array b"),
        ({"a": 2, "b": 4}, r"like has b of shape \(4,\), and \(3,\) was saved"),
        ({"a": 2, "b": 3, "c": 1}, "like has an array c, which was"),
    ):
        with pytest.raises(ValueError, match=named):
            dpx.load(path, like={name: jnp.ones(size) for name, size in sizes.items()})
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
    loaded = dpx.load(tmp_path / "tuned", like=model)
    assert loaded.guarantee == tuned.guarantee
    assert tuned.history
    assert not loaded.history
    back = loaded.params
    np.testing.assert_array_equal(back(TOKENS), nnx.merge(graph, tuned.params)(TOKENS))
