"""What config files share: the argument after the colon, sections, and what their keys mean."""

from typing import Any

from ml_collections import config_dict

# What a key means that several configs have. A config adds those of its own to them, in its MEANINGS.
MEANINGS = {
    "experiment": "the module that runs it; fixed by the config file",
    "epsilon": "ε, the whole budget of what a run releases in the row that it is about",
    "delta": "δ, below one over the number of records",
    "seed": "of data, of initial parameters, and of all else that is public",
    "noise_seed": "makes a run reproducible; the guarantee then holds only while nobody knows it",
    "comparisons": "also release what the private row is compared with, each for the whole budget "
    "again; by default on data that come with dpx alone",
    "num_seeds": "repetitions of all rows, each with releases of its own",
    "log": 'where losses go beside metrics.jsonl: "tensorboard", "wandb", "trackio" or a .csv file',
    "data.kind": "which data; fixed by the variant",
    "data.path": "the file or folder of the private records",
    "data.public_path": "documents that are no secret",
    "data.column": "of a table: the column that holds the text",
    "data.user": "of a table: the column that names who a row belongs to; that user is then the unit",
    "data.record": 'what a record is: "line", "document" or "window"',
    "data.length": "tokens or characters of a record that are read; what is longer is cut",
    "data.held_out": "how many records, or which share of them or of the users, are kept to measure on",
    "data.split_seed": "draws which records are held out",
    "data.limit": "records, or users, to train on; 0 for all",
    "data.generated": "size of data that nobody wrote, in place of a file; 0 for none",
    "data.num_users": "users that are generated",
    "data.num_items": "items that there are",
    "data.year": "of Amazon ratings in a .csv, whose columns differ: 2014, 2018 or 2023",
    "data.min_count": "users and items with fewer interactions are left out, again and again",
    "data.header": "whether the first line names the columns, where that is not clear",
    "data.separator": "what stands between cells, where the file's name does not say it",
    "model.kind": '"transformer", "gru" or "lstm"',
    "model.dim": "width d",
    "model.num_heads": "attention heads of a block",
    "model.num_blocks": "transformer blocks, or recurrent layers",
    "model.tied": "whether the embedding of the tokens is also the output layer",
    "model.dropout": "share of activations that are dropped in training",
    "model.unroll": "compile every layer on its own: takes longer, and runs faster on CPUs",
    "model.embed_std": "standard deviation of the initial embeddings",
    "reattention.enabled": "adds a row with Re-Attention at the same budget",
    "reattention.probabilities": 'of the tokens, from which their noise follows: "release" pays for '
    'them, "uniform" assumes them, "public" reads them from reattention.path',
    "reattention.path": "file of public token probabilities",
    "reattention.budget_fraction": "share of ε that releases token probabilities",
    "reattention.max_tokens": "tokens of a record that count in them",
    "reattention.renormalize": "whether corrected weights add up to 1 again",
    "reattention.scale": "multiplies the variance that is corrected for",
    "reattention.floor": "least probability of a token",
    "tune.rank": "rank of an adapter",
    "tune.alpha": "an adapter counts alpha / rank",
    "tune.rslora": "an adapter counts alpha / √rank instead",
    "tune.layers": "how many layers get adapters, the last ones; 0 for all",
    "tune.train_first": "whether both factors are trained; the first is random and public otherwise",
    "tune.adapter_seed": "of the first factors, public",
    "mesh.data": "devices over which the records are spread; one by default, all with --distributed",
    "mesh.model": "devices over which every large array is spread",
    "train.steps": "number of steps",
    "train.batch_size": "expected number of records, or users, in a step",
    "train.records_per_user": "records that a step draws of a user at most, where users are the unit",
    "train.sampling": '"poisson", "allocation" (once an epoch), or "auto": that with less noise',
    "train.secure": "samples and noise of the private rows from ChaCha20, and not from JAX's generator",
    "train.microbatch_size": "records, or users, whose gradients are clipped at a time, to bound memory",
    "train.compute_dtype": '"float32", or "bfloat16" for activations',
    "train.learning_rate": "of AdamW, at its highest",
    "train.warmup": "share of the steps in which it rises; then it falls to zero",
    "train.weight_decay": "of AdamW",
    "train.l2_clip_norm": "the norm to which the gradient of each record, or user, is clipped",
    "train.normalize": "scale every gradient to that norm, and not only longer ones",
    "train.accountant": '"pld", which is tight, or "rdp"',
    "train.log_every": "steps between lines of progress",
    "train.checkpoint_every": "steps between checkpoints, from which a killed run goes on",
    "non_private.start": 'where the row without privacy starts: "scratch", "exact" counts or "pretrained"',
    "non_private.steps": "its number of steps; 0 for no such row",
    "non_private.batch_size": "its batch size, of records also where users are the unit; by default train's",
    "non_private.learning_rate": "its learning rate",
    "non_private.tried.start": "starts of which a part of the training records chooses",
    "non_private.tried.steps": "numbers of steps of which it chooses",
    "non_private.tried.learning_rate": "learning rates of which it chooses",
    "non_private.tried.l2": "weights λ of which it chooses, of a penalty λ/2 ‖parameters‖²",
    "prior.order": "n of the private n-gram model that the private row starts from",
    "prior.budget_fraction": "share of ε that pays for it; 0 trains from scratch",
    "ngrams": "n of the private n-gram models beside it",
    "train_loss": "also measure the loss on training records, which is private",
    "popularity_budget_fraction": "share of the budget that releases the items' popularity",
    "popularity_age_decay": "below 1, later items of a history count more in it",
    "evaluate.k": "length of the list in NDCG@k and HIT@k",
    "evaluate.exclude_seen": "leave out the items of a user's history",
    "evaluate.split": 'the item that is predicted: "test", the last, or "validation", the one before',
    "regression.steps": "of the private logistic regression beside it",
    "regression.batch_size": "its expected batch size",
    "regression.learning_rate": "its learning rate",
    "regression.l2_clip_norm": "its clipping norm",
    "dim": "D, dimensions of a feature vector",
    "num_groups": "groups, or labels, that there are",
    "trials": "repetitions with fresh data, or of the noise, over which errors are means",
    "query_counts": "numbers of queries that fresh noise for each query is compared at",
    "num_queries": "queries that errors are measured at",
    "neighboring": '"add_or_remove_one" or "replace_one"',
    "largest_logit": "a logit is at most this; by default the expected error chooses it",
    "sample.count": "texts to draw after the run",
    "sample.length": "tokens of each",
}


def parse_arg(arg: str, variants: tuple[str, ...] = ()) -> tuple[str, bool]:
    """Splits `NAME.py:variant,tiny` into the variant and whether `tiny` was asked for.

    Args:
      arg: The text after the colon: empty, a variant, `tiny`, or both with a comma between.
      variants: The admissible variants, the default first; empty where there is only one.

    Returns:
      The variant ("" where there are none) and the flag.

    Raises:
      ValueError: for an unknown word or two variants.
    """
    words = [word for word in (arg or "").split(",") if word]
    tiny = "tiny" in words
    named = [word for word in words if word != "tiny"]
    if len(named) > 1 or any(word not in variants for word in named):
        known = ", ".join((*variants, "tiny"))
        raise ValueError(f"config argument {arg!r} is not known: use one of {known}")
    return (named or list(variants[:1]) or [""])[0], tiny


def begin(experiment: str, *, epsilon: float, delta: float) -> dict:
    """What every config has."""
    own = {"seed": 0, "noise_seed": config_dict.placeholder(int)}
    return {"experiment": experiment, "epsilon": epsilon, "delta": delta, **own}


def training(
    *, steps: int, batch_size: Any, microbatch_size: int, learning_rate: float, **changed
) -> dict:
    """The sections of a training: `train`, on how many devices, and where its losses go.

    `--config.mesh.data=8` spreads the records, `--config.mesh.model=2` every large array. By default one
    device trains, or with `--distributed` all devices of all processes.
    """
    train = {
        "steps": steps,
        "batch_size": batch_size,
        "microbatch_size": microbatch_size,
        "learning_rate": learning_rate,
        "warmup": 0.1,
        "weight_decay": 1e-5,
        "l2_clip_norm": 1.0,
        "normalize": True,
        "accountant": "pld",
        "sampling": "poisson",  # or "allocation", or "auto" for the one with less noise
        "secure": False,
        "log_every": 25,
        "checkpoint_every": 50,
        **changed,
    }
    mesh = {"data": config_dict.placeholder(int), "model": 1}
    return {"train": train, "mesh": mesh, "log": config_dict.placeholder(str)}


def tune(mode: str, *, layers: int, **more) -> dict:
    """The section `tune`: what is trained of a pretrained model."""
    return {
        "mode": mode,
        "target_modules": ("all-linear",),
        "rank": 8,
        "alpha": 8.0,
        "rslora": False,
        "layers": layers,
        "train_first": False,
        "adapter_seed": 0,
        **more,
    }


def regression(*, tiny: bool) -> dict:
    """The section `regression`: a private logistic regression beside other classifiers."""
    size = {"steps": 5, "batch_size": 30} if tiny else {"steps": 100, "batch_size": 4000}
    return {**size, "learning_rate": 0.3, "l2_clip_norm": 0.5}


def table() -> dict:
    """How a table of one's own is written, in the section `data`.

    `header` says whether the first line names the columns: it has to be given where that line can be both.
    `separator` has to be given where cells are not separated as the file's name says.
    """
    return {"header": config_dict.placeholder(bool), "separator": config_dict.placeholder(str)}


def non_private(**changed) -> dict:
    """The section `non_private`: how the row without privacy is trained, by what it changes of `train`.

    Of the values in `tried`, where there are any, a part of the training records chooses; what is not tried
    stands beside it. With `steps` of 0 there is no such row.
    """
    tried = dict.fromkeys(("start", "steps", "learning_rate", "l2"), ())
    own = {"start": "scratch", "batch_size": config_dict.placeholder(int)}
    return {**own, **changed, "tried": tried | changed.get("tried", {})}


def reattention(*, enabled: bool = False, max_tokens: int = 8) -> dict:
    """The section `reattention`: whether a row with it is trained, and from what it knows the tokens.

    `budget_fraction` of ε pays for releasing token probabilities, to which a record adds up to
    `max_tokens` tokens.
    """
    return {
        "enabled": enabled,
        "probabilities": "release",
        "path": config_dict.placeholder(str),
        "budget_fraction": 0.02,
        "max_tokens": max_tokens,
        "renormalize": True,
        "scale": 1.0,
        "floor": 1e-6,
    }
