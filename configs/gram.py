"""The private attention matrix: a DP release of XXᵀ whose columns are the records.

`error` (the default) measures what the theorems of Gao, Song, Yang and Zhou (arXiv 2305.04701) bound: how
far attention from the release is from the exact one. It does so for additive Gaussian noise, for the
paper's Gaussian sampling with the Rényi number of samples and with the paper's, and for the uniform
matrix. The columns are synthetic: independent, of equal length, in random directions of a subspace of
`latent_dim` dimensions, with |XXᵀ| ≤ about `logit_bound`. The column bound α is `slack` times their
length, and errors grow with α².

    python -m experiments.run   --config=configs/gram.py --workdir=runs/gram
    python -m experiments.sweep --config=configs/gram.py --workdir=runs/gram_epsilon
    python -m experiments.sweep --config=configs/gram.py --workdir=runs/gram_columns \\
        --set=columns=10000,100000,1000000,10000000
    python -m experiments.sweep --config=configs/gram.py --workdir=runs/gram_change \\
        --set=max_column_change_fraction=0.01,0.03,0.1,0.3,1
    python -m experiments.sweep --config=configs/gram.py --workdir=runs/gram_rows --set=rows=2,4,8,16,32
    python -m experiments.sweep --config=configs/gram.py --workdir=runs/gram_matrices --set=seed=0,1,2,3,4

A run takes 14 seconds at the defaults (n = 8, d = 1e6, ε = 0.09). Expect a largest entry error of 2.4e-5
for additive noise and of 1.5e-3 for the paper's number of samples. Another X, from another seed, moves
them by about 10 %.

`table` releases XXᵀ of a matrix of your own from a .csv, .tsv, .npy or .npz file; `--config.data.array` names
one of the arrays of an .npz file. The columns are the records; `--config.data.transpose=True` takes the rows.
`column_bound` bounds the l2 norm of a record and has to be known without looking at the data, such as √n for
entries in [−1, 1]. The matrix and its guarantee are saved in the run's folder as gram.dpx. Of a table,
`--config.data.header` and `--config.data.separator` say how it is written, where that is not clear.

    python -m experiments.run --config=configs/gram.py:table --workdir=runs/own --config.data.path=X.csv \\
        --config.column_bound=2.0

`recommender` ranks what can be recommended from one private release, without training. Users are the
columns and items the rows, and the Gram matrix of the items becomes EASE weights, or attention between
items. Beside it stand `dpx.recommend.transitions`, which count what follows what, in six rounds and in
one. K and λ follow from ε and the number of users; the row ease_fixed has fixed ones. The default sweep
is over ε, and `--set=num_kept=100,300,1000,3000` sweeps over K.

    python -m experiments.sweep --config=configs/gram.py:recommender --workdir=runs/one_release \\
        --config.data.path=amazon_games.txt --config.num_seeds=5 --set=epsilon=5,8,10

`features` releases the Gram matrix of 64 features of 20 Newsgroups, with labels, and measures what it is good
for: principal components and a regression. The data are those of configs/cross_attention.py:retrieval. On
your own data what it is compared with needs `--config.comparisons=True`.

    python -m experiments.sweep --config=configs/gram.py:features --workdir=runs/gram_features

A run of `recommender` with one seed takes about 50 s of one core, of which a release of transitions takes
two. Expect NDCG@10 / HIT@10 of 4.7 / 8.2 % for transitions at ε = 8. The tables are in
experiments/gram/README.md.
"""

from ml_collections import ConfigDict, config_dict

from configs import common
from configs.common import begin, parse_arg, regression, table

VARIANTS = ("error", "recommender", "features", "table")

MEANINGS = common.MEANINGS | {
    "rows": "n, rows of X",
    "columns": "d, columns of X, which are the records",
    "latent_dim": "rank of XXᵀ, where below n",
    "logit_bound": "the largest |entry| of XXᵀ, about",
    "slack": "column bound over the length of the columns",
    "max_column_change_fraction": "how far a column may change, as a share of twice the column bound",
    "eta_fraction": "η of the sampling mechanism, as a share of logit_bound",
    "kernel": '"exp" or "cosh", of which attention is made',
    "data.array": "which array of an .npz file",
    "data.transpose": "whether the rows are the records",
    "data.kind": 'of recommender: "amazon", "movielens" or "movielens1m"',
    "data.limit": "only the first users, over the items that these have; 0 for all",
    "data.generated": "documents of no use but to try the code; 0 for none",
    "column_bound": "l2 norm of a record at most; known without looking at the data",
    "max_column_change": "how far a record may change; twice column_bound by default",
    "components": "numbers of principal components",
    "power_steps": "steps of the private power method beside it",
    "popularity_budget_fraction": "share of μ² for the popularity",
    "transitions.rounds": "rounds in which transitions are released",
    "transitions.gap_decay": "two items at a distance of g weigh gap_decay^(g − 1)",
    "transitions.max_gap": "largest distance of two items that count",
    "transitions.age_decay": "an older pair of items counts less by this for each item after it",
    "transitions.order_weight": "weight of which of two items came first; 0 for none",
    "transitions.position_weight": "weight of where in a history an item stands; 0 for none",
    "transitions.popularity_age_decay": "below 1, later items count more in its popularity",
    "num_kept": "K, items of the release, the most popular ones; by a rule by default",
    "regularization": "λ of EASE; by a rule by default",
    "attention_prior_weight": "weight of the log popularity in attention between items",
    "fixed.num_kept": "K of the row ease_fixed, found on the test item and for comparison only",
    "fixed.regularization": "its λ",
    "fixed.prior_weight": "its weight of the log popularity",
    "fixed.popularity_budget_fraction": "its share of ε for the popularity",
}


def get_config(arg: str = "") -> ConfigDict:
    variant, tiny = parse_arg(arg, VARIANTS)
    make = {
        "error": _error,
        "recommender": _recommender,
        "features": _features,
        "table": lambda tiny: _table(),
    }
    return ConfigDict(make[variant](tiny))


def _error(tiny: bool) -> dict:
    return {
        **begin("gram.attention_error", epsilon=1.0 if tiny else 0.09, delta=1e-6),
        "rows": 8,
        "columns": 20_000 if tiny else 1_000_000,
        "latent_dim": 4,
        "logit_bound": 0.09,
        "slack": 1.7,
        "max_column_change_fraction": 1.0,
        "eta_fraction": 1.0,
        "kernel": "exp",
        "trials": 20 if tiny else 1000,
    }


def _table() -> dict:
    own = {name: config_dict.placeholder(str) for name in ("path", "array")}
    return {
        **begin("gram.own_matrix", epsilon=1.0, delta=1e-6),
        "data": {**own, **table(), "transpose": False},
        "column_bound": config_dict.placeholder(float),
        "max_column_change": config_dict.placeholder(float),
        "neighboring": "replace_one",
        "kernel": "exp",
    }


def _features(tiny: bool) -> dict:
    own = {name: config_dict.placeholder(str) for name in ("path", "public_path", "column")}
    return {
        **begin("gram.features", epsilon=1.0, delta=1e-5),
        "comparisons": config_dict.placeholder(bool),
        "data": {**own, "generated": 300 if tiny else 0},
        "dim": 8 if tiny else 64,
        "num_groups": 4 if tiny else 20,
        "components": (2,) if tiny else (5, 20),
        "power_steps": 2,
        "regression": regression(tiny=tiny),
    }


def _recommender(tiny: bool) -> dict:
    return {
        **begin("gram.one_release", epsilon=8.0, delta=1e-3 if tiny else 1 / 31_013),
        "num_seeds": 2 if tiny else 1,
        "popularity_budget_fraction": 0.1,
        "popularity_age_decay": 0.2,
        "transitions": {
            "rounds": 6,
            "gap_decay": 0.9,
            "max_gap": 20,
            "age_decay": 0.95,
            "order_weight": 1.0,
            "position_weight": 0.1,
            "popularity_age_decay": 0.8,
        },
        "num_kept": config_dict.placeholder(int),
        "regularization": config_dict.placeholder(float),
        "attention_prior_weight": 2e-3,
        "fixed": {
            "num_kept": 5 if tiny else 3000,
            "regularization": 800.0,
            "prior_weight": 1e-4,
            "popularity_budget_fraction": 0.05,
        },
        "data": {
            "kind": "amazon",
            "path": config_dict.placeholder(str),
            "year": 2014,
            "min_count": config_dict.placeholder(int),
            "limit": 300 if tiny else 0,
        },
        "evaluate": {"k": 10, "exclude_seen": False, "split": "test"},
    }


def sweep(arg: str = "") -> dict[str, list]:
    variant, tiny = parse_arg(arg, VARIANTS)
    epsilons, of_tiny = {
        "error": ([0.03, 0.09, 0.3, 1.0, 3.0, 10.0], [0.5, 5.0]),
        "table": ([0.3, 1.0, 3.0, 10.0], [1.0, 8.0]),
        "features": ([0.1, 1.0, 8.0], [0.1, 1.0, 8.0]),
        "recommender": ([0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 10.0], [1.0, 8.0]),
    }[variant]
    seeds = {"seed": [0] if tiny else [0, 1, 2]} if variant == "features" else {}
    return {"epsilon": of_tiny if tiny else epsilons, **seeds}
