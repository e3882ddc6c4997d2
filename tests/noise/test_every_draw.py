"""Every place of the library that draws: what a guarantee rests on comes from `dpx.noise`, made of bits."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import dpx

ROOT = Path(dpx.__file__).parent

# What makes, splits or shows a key, and draws nothing.
KEYS = {
    "PRNGKey", "clone", "fold_in", "key", "key_data", "key_impl", "split", "wrap_key_data",
    "SeedSequence", "Generator",
}  # fmt: skip
SOURCES = (
    "jax.random.",
    "jax.extend.random.",
    "numpy.random.",
    "random.",
    "secrets.",
    "os.urandom",
)
# Methods of a generator, whatever the variable is called that holds it.
METHODS = {
    "beta", "binomial", "bytes", "chisquare", "choice", "exponential", "gamma", "geometric", "gumbel",
    "integers", "laplace", "logistic", "multinomial", "multivariate_normal", "normal", "permutation",
    "permuted", "poisson", "random", "random_raw", "rvs", "shuffle", "standard_cauchy",
    "standard_exponential", "standard_gamma", "standard_normal", "standard_t", "uniform", "wald",
}  # fmt: skip

INITIAL = "where a model or an iteration starts, which is public"
PUBLIC = "features, points or orders that are the same for everybody, from a seed that is public"
SYNTHETIC = "synthetic data, of which nothing is private"
RELEASED = "text from a model that was released: post-processing"
CANARIES = "coins of an audit, which bounds ε from below"
NAME = "the name of a file that is not complete, which no other process uses"
SECRET = "keys and salts, from the operating system"
SAMPLING = "Poisson sampling and groups: uniform numbers of 53 bits, so that q is right to 2⁻⁵³"
ALLOCATION = (
    "steps of an epoch: whole numbers by rejection of 32 or 64 bits, each as likely as the others"
)
CHOSEN = "which records of a user a step takes: a guarantee holds whichever they are"
TRIALS = "how many trials a selection has: 256 bits, turned into the law by exact arithmetic"
POINTS = "which candidate a trial runs, whose probabilities are public"

# Where is drawn outside of `dpx.noise`, what, and why no guarantee needs more of its law.
ELSEWHERE = {
    "_storage.py replacing": ({"token_hex"}, NAME),
    "audit/dirac.py dirac": ({"default_rng", "random"}, CANARIES),
    "cross_attention/features.py RandomFeatures.draw": ({"normal", "orthogonal"}, PUBLIC),
    "cross_attention/sketch/simulated.py _clusters": (
        {"default_rng", "integers", "normal"},
        SYNTHETIC,
    ),
    "cross_attention/sketch/simulated.py _directions": ({"normal"}, SYNTHETIC),
    "cross_attention/sketch/simulated.py _places": ({"random"}, SYNTHETIC),
    "cross_attention/sketch/simulated.py _simulated": ({"default_rng", "normal"}, SYNTHETIC),
    "cross_attention/sketch/simulated.py _uniform": ({"default_rng"}, SYNTHETIC),
    "cross_attention/sketch/simulated.py _blocks": ({"default_rng", "normal"}, SYNTHETIC),
    "data/embedding.py fit_embedding": ({"default_rng", "normal"}, PUBLIC),
    "data/newsgroups.py text_prompts": ({"default_rng", "permutation"}, PUBLIC),
    "data/synthetic.py synthetic_histories": (
        {"choice", "default_rng", "permutation", "random"},
        SYNTHETIC,
    ),
    "data/records.py split": ({"default_rng", "permutation"}, PUBLIC),
    "runs/selection.py _draw": ({"default_rng", "integers"}, POINTS),
    "nn/lora.py attach": ({"normal"}, INITIAL),
    "nn/pretrained/layers.py Layers.__init__.draw": ({"normal"}, INITIAL),
    "nn/transformer.py generate.step": ({"categorical"}, RELEASED),
    "noisy_head/descent.py _initial": ({"normal"}, INITIAL),
    "noisy_head/prompts.py _normals": ({"bits"}, SYNTHETIC),
    "privacy/selection.py Trials.draw": ({"bytes"}, TRIALS),
    "training/keys.py _draw": ({"urandom"}, SECRET),
    "training/keys.py fingerprint": ({"urandom"}, SECRET),
    "training/purposes.py secret_key": ({"urandom"}, SECRET),
    "training/sampling.py _allocated": ({"integers"}, ALLOCATION),
    "training/sampling.py _generator": ({"default_rng"}, SAMPLING),
    "training/sampling.py _poisson": ({"integers", "random"}, SAMPLING),
    "training/users.py _distinct": ({"randint"}, CHOSEN),
}
# Inside of `dpx.noise` laws are made of fair bits alone.
BITS = {"bits", "threefry2x32_p", "bind"}


def names(tree):
    """The dotted name that each name of a module stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def dotted(node, known):
    """The dotted name of an expression, None where it is none; "?" stands for what is no module."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, known)}.{node.attr}"
    if isinstance(node, ast.Name):
        return known.get(node.id, "?")
    return "?"


def draws(source):
    """(function, what is drawn) of each draw in the text of a module."""
    tree = ast.parse(source)
    known, found = names(tree), set()

    def visit(node, where):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}".strip(".")
        if isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node, known)
            last = name.rsplit(".", 1)[-1]
            if name.startswith(SOURCES) and last not in KEYS | {"random"}:
                found.add((where, last))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # Of a variable, of what a call returns, or of SciPy's laws, and not of a module of this project.
            name = dotted(node.func, known)
            if node.func.attr in METHODS and name.startswith(("?", "scipy.stats.")):
                found.add((where, node.func.attr))
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    visit(tree, "")
    return found


def everywhere():
    found = defaultdict(set)
    for path in sorted(ROOT.rglob("*.py")):
        for where, what in draws(path.read_text()):
            found[f"{path.relative_to(ROOT).as_posix()} {where}".strip()].add(what)
    return found


@pytest.mark.slow
def test_what_is_drawn_outside_of_the_noise_is_listed_with_a_reason():
    found = {name: drawn for name, drawn in everywhere().items() if not name.startswith("noise/")}
    assert found == {name: drawn for name, (drawn, _) in ELSEWHERE.items()}


@pytest.mark.slow
def test_noise_is_made_of_bits():
    found = {name: drawn for name, drawn in everywhere().items() if name.startswith("noise/")}
    assert {name.split()[0] for name in found} >= {"noise/coupled.py", "noise/leaves.py"}
    assert set().union(*found.values()) <= BITS


def test_discrete_noise_has_one_door():
    """OpenDP draws what it is asked for, under names that are its own."""
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if any("opendp" in name for name in names(ast.parse(path.read_text())).values())
    }
    assert users == {"noise/secure.py"}


@pytest.mark.parametrize(
    "text",
    [
        "import jax\ndef f(key): return map(jax.random.laplace, key)",
        "import jax.random as jr\ndef f(key): return jr.laplace(key)",
        "from jax import random\ndef f(key): return random.laplace(key)",
        "from jax.random import laplace as other\ndef f(key): return other(key)",
        "import numpy as np\ndef f(rng): return rng.laplace()",
        "import numpy as np\ndef f(): return np.random.default_rng(0).laplace()",
        "from scipy import stats\ndef f(): return stats.laplace.rvs()",
        "import random\ndef f(): return random.gauss(0, 1)",
        "from secrets import randbits\ndef f(): return randbits(8)",
        "def f():\n    import jax\n    return jax.random.laplace",
    ],
)
def test_a_draw_is_found_however_it_is_written(text):
    assert {where for where, _ in draws(text)} == {"f"}


@pytest.mark.parametrize(
    "text",
    [
        "from dpx.noise import coupled\ndef f(key): return coupled.normal(key, ())",
        "import jax\ndef f(key): return jax.random.split(jax.random.fold_in(key, 1))",
        "import numpy as np\ndef f(x: np.random.Generator): return np.random.SeedSequence(1)",
    ],
)
def test_what_draws_nothing_is_not_found(text):
    assert not draws(text)
