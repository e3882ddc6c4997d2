"""A setting that no run could use is named, before anything is spent: every config's, in one table."""

import ast
import re

import numpy as np
import pytest
from all_configs import configured

from dpx.runs import run

# Of a config, values that are named as they stand here.
NAMED = {
    "classify:table,tiny": (
        "data.kind='films' data.held_out=1.0 tune.mode='none' model.kind='random' "
        "model.kept_layers=-1 model.read_layers=0 model.dtype='float17' words.dim=0 "
        "center_budget_fraction=1.0"
    ),
    "classify:sentences,tiny": "words.batch_size=1000000",
    "cross_attention:size,tiny": (
        "data.n=1 data.key_bound=0.0 degrees=(3,) query_counts=(0,) tree.bins=0 trials=0"
    ),
    "cross_attention:diamonds,tiny": "kernel.degree=3 kernel.largest_logit=-1.0",
    "cross_attention:reader,tiny": "model.dim=0 public_training.steps=0 data.held_out=0",
    "cross_attention:table,tiny": (
        "value_bound=-1.0 domain='sphere' temperature=0.0 features='fourier' value_domain='cube'"
    ),
    "cross_attention:retrieval,tiny": "regression.batch_size=301 query_counts=(10,10)",
    "cross_attention:sentences,tiny": "neighbours=(0,) language.kind='gguf'",
    "finetune:tiny": (
        "tune.mode='prefix' tune.rank=0 tune.layers=9 model.kind='onnx' model.dtype='int8' "
        "sample.count=0 data.record='page' data.length=0 data.limit=-1 "
        "train.batch_size=1000000 train.learning_rate=nan ngrams=(1,1)"
    ),
    "gram:error,tiny": (
        "rows=0 max_column_change_fraction=1.5 eta_fraction=0.0 kernel='relu' slack=0.9 "
        "latent_dim=0"
    ),
    "gram:features,tiny": (
        "components=(8,) components=(2,2) power_steps=0 dim=0 regression.batch_size=301"
    ),
    "gram:recommender,tiny": (
        "num_kept=1000000 transitions.rounds=0 popularity_budget_fraction=0.0 "
        "fixed.popularity_budget_fraction=1.0 fixed.regularization=-1.0 evaluate.split='train'"
    ),
    "gram:table,tiny": "column_bound=-1.0 max_column_change=5.0 neighboring='remove' kernel='relu'",
    "next_tokens:tiny": (
        "public=20 dim=0 degree=3 clip_quantile=1.0 draws=0 tune.target_modules=('q_proj',)"
    ),
    "noisy_head:low_dim": "epsilon=-1.0 delta=0.0 trials=0 regularization=-5.0 dim=0",
    "noisy_head:early_stopping": "methods=() steps_grid=(0,20) steps_grid=()",
    "noisy_head:robustness": "methods=() powers=() where='labels'",
    "noisy_head:text,tiny": "test_fraction=1.0 data.source='web' steps_grid=(8,8)",
    "reattention:tiny": "data.num_items=0 data.length=1 one_key.samples=0 table.stds=(-1.0,)",
    "recommender:synthetic,tiny": (
        "choice_budget_fraction=-0.1 choice_budget_fraction=1.0 start.budget_fraction=1.0 "
        "start.budget_fraction=-0.1"
    ),
    "recommender:amazon_warm,tiny": "start.pseudo_counts=0.0 start.recency=1.5",
    "recommender:table,tiny": "data.limit=-1 train.batch_size=1000000",
    "shakespeare:tiny": (
        "reattention.probabilities='guess' reattention.max_tokens=0 reattention.scale=-1.0 "
        "model.kind='rnn'"
    ),
    "text:tiny": "data.record='page' data.outside='guess' data.held_out=1.0 ngrams=(1,1)",
}
# Part of a private table would be public without later texts.
OWN_TEXTS = {"data.kind": "table", "data.path": "x.csv", "data.text": "a", "data.label": "b"}
# And others, with what is said of them.
SAID = [
    ("next_tokens:tiny", {"data.record": "window", "data.user": "who"}, "data.record='window'"),
    ("recommender:amazon_warm,tiny", {"popularity_budget_fraction": 0.1}, "would pay twice"),
    ("classify:table,tiny", {"data.labels": ()}, "must name two labels or more"),
    ("classify:table,tiny", {"data.labels": ("a", "a")}, "each once"),
    ("classify:table,tiny", {"data.labels": (1, "1")}, "each once"),
    ("classify:table,tiny", {"data.labels": ("no", "yes", "yes ")}, "each once"),
    (
        "classify:table,tiny",
        {"data.labels": ("no", "NA")},
        "('no', 'NA') must be words: one holds 'NA'",
    ),
    ("classify:table,tiny", {"data.text": None}, "config.data.text is missing"),
    ("classify:table,tiny", {"data.kind": "sentences"}, "is no table of your own"),
    ("classify:table,tiny", {"tune.mode": "probe"}, "must be 'full'"),
    ("classify:table,tiny", {"model.path": "folder"}, "model.path='folder' must be left out"),
    ("cross_attention:table,tiny", {"data.path": None}, "config.data.path is missing"),
    ("cross_attention:table,tiny", {"data.key": ""}, "config.data.key is missing"),
    ("cross_attention:table,tiny", {"key_bound": None}, "config.key_bound is missing"),
    ("cross_attention:table,tiny", {"num_features": 8}, "num_features=8 is for random features"),
    ("cross_attention:table,tiny", {"degree": 2}, "use --config.features=taylor"),
    ("cross_attention:table,tiny", {"features": "taylor", "degree": 3}, "degree=3 must be even"),
    ("cross_attention:sentences,tiny", {"language.path": "x.gguf"}, "must be left out"),
    ("cross_attention:sentences,tiny", {"language.words": ("no",)}, "must be 2 words"),
    ("cross_attention:sentences,tiny", {"language.words": ("no", "nay")}, "no two are equal"),
    ("cross_attention:sentences,tiny", {"language.template": "Is it?"}, "must have one {}"),
    ("cross_attention:sentences,tiny", {"dim": 17}, "must be at most 16, the width of the encoder"),
    ("cross_attention:sentences,tiny", OWN_TEXTS, "config.data.test_path is missing"),
    ("cross_attention:sentences,tiny", OWN_TEXTS | {"data.user": "who"}, "must be left out"),
    ("cross_attention:retrieval,tiny", {"dim": 150}, "must be less than 150, the number of public"),
    ("finetune:tiny", {"tune.target_modules": ("queries",)}, "config.tune.target_modules"),
    ("finetune:tiny", {"model.path": "folder"}, "or use --config.model.kind=pretrained"),
    ("finetune:tiny", {"ngrams": (4,)}, "config.ngrams must be from 1 to 3, not 4"),
    ("finetune:scratch,tiny", {"data.length": 11}, "data.length=11 must be at least 12"),
    ("gram:recommender,tiny", {"data.path": None}, "config.data.path is missing"),
    ("gram:recommender,tiny", {"data.kind": "movielens"}, "is not read by data.kind='movielens'"),
    (
        "gram:table,tiny",
        {"column_bound": None},
        "column_bound is missing: set --config.column_bound",
    ),
    ("gram:table,tiny", {"data.path": None}, "config.data.path is missing"),
    ("gram:table,tiny", {"data.path": "none.npy"}, "none.npy: no such file"),
    ("noisy_head:low_dim", {"methods": ("foo",)}, "methods='foo'"),
    ("noisy_head:useful", {"axes.num_prompts": (0,)}, "axes.num_prompts"),
    ("noisy_head:useful", {"ridges": (0.1, 0.0)}, "config.ridges="),
    ("noisy_head:early_stopping", {"inits": ("foo",)}, "inits='foo'"),
    ("noisy_head:high_dim", {"epsilon": 5.0}, "classical Gaussian bound"),
    ("noisy_head:text,tiny", {"data.path": None}, "config.data.path is missing"),
    ("noisy_head:text,tiny", {"data.column": "a"}, "config.data.column='a' is for texts"),
    ("reattention:tiny", {"mesh.data": 4096}, "must have at most 1 devices"),
    ("recommender:amazon,tiny", {"data.kind": "table"}, "configs/recommender.py:table"),
    ("recommender:movielens,tiny", {"data.kind": "synthetic"}, "configs/recommender.py:synthetic"),
    ("recommender:synthetic,tiny", {"data.kind": "amazon"}, "configs/recommender.py:amazon"),
    ("recommender:synthetic,tiny", {"choice_budget_fraction": 0.96}, "must leave some"),
    ("text:tiny", {"prior.budget_fraction": 0.9999}, "must be in [0, 0.99]"),
    ("classify:tiny", {"center_budget_fraction": 0.9999}, "must be in [0, 0.99]"),
    ("shakespeare:tiny", {"reattention.budget_fraction": 0.98}, "must leave some"),
    ("recommender:amazon_warm,tiny", {"model.kind": "gru"}, "needs model.kind='transformer'"),
    ("recommender:table,tiny", {"data.path": None}, "give the file of interactions"),
    ("recommender:table,tiny", {"data.user": "who"}, "has no column 'who'"),
    ("shakespeare:tiny", {"reattention.budget_fraction": 0.0}, "token probabilities"),
    ("shakespeare:tiny", {"reattention.probabilities": "public"}, "path is missing"),
    ("shakespeare:tiny", {"model.kind": "gru"}, "needs attention"),
    ("shakespeare:tiny", {"prior.order": 5}, "order=5 with vocab_size=65"),
    ("text:tiny", {"ngrams": (1, 5)}, "order=5 with vocab_size=98"),
    ("text:tiny", {"data.path": None, "data.generated": 0}, "data.path is missing"),
]
# What is read before it is checked takes seconds.
SLOW = ("cross_attention:sentences", "finetune:scratch", "next_tokens", "noisy_head:high_dim")


def cases():
    for source, words in NAMED.items():
        for word in words.split():
            key, _, value = word.partition("=")
            value = float("nan") if value == "nan" else ast.literal_eval(value)
            yield source, {key: value}, f"{key.rpartition('.')[2]}={value!r}"
    yield from SAID


@pytest.mark.parametrize(
    ("source", "changes", "words"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{'-'.join(case[1])}",
            marks=pytest.mark.slow if case[0].startswith(SLOW) else (),
        )
        for case in cases()
    ],
)
def test_it_is_named(source, changes, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = configured(source, tmp_path)
    with config.ignore_type():
        config.update_from_flattened_dict(changes)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)) as error:
        run.check(config)
    assert len(str(error.value).splitlines()) == 1


def ones(*shape):
    return np.ones(shape)


# Of a file: the config that reads it, its name and content, and what is said of it.
FILES = [
    ("gram:table", "x.npz", {"X": ones(2, 3), "other": ones(1)}, "x.npz: holds X, other: name one"),
    ("gram:table", "x.npy", ones(1, 2) * np.nan, "x.npy: holds values that are not finite"),
    ("gram:table", "x.npy", ones(3), "x.npy: the array has shape (3,)"),
    ("gram:table", "x.npy", ones(30_000, 1), "set --config.data.transpose=True"),
    ("noisy_head:text", "x.npz", {"x": ones(9, 4, 5)}, "has no array 'y': it holds x"),
    ("noisy_head:text", "x.npz", {"x": ones(9, 4, 5), "y": ones(9, 3)}, "x is (9, 4, 5) and y is"),
    ("noisy_head:text", "x.npz", {"x": ones(9, 4, 5) * np.nan, "y": ones(9, 4)}, "not finite"),
    ("noisy_head:text", "x.npz", {"x": ones(1, 4, 5), "y": ones(1, 4)}, "1 prompts leave none"),
    ("noisy_head:text", "x.npy", ones(6, 3), "6 lines are no whole number of prompts of 4 tokens"),
    ("cross_attention:table", "x.csv", "a,b\n1,2\n", "no column 'K': it has a, b"),
    ("cross_attention:table", "x.csv", "K,V\nc,2\n", "line 2, column 'K' is 'c'"),
    ("cross_attention:table", "x.csv", None, "x.csv: no such file"),
    ("cross_attention:table", "x.npz", {"K": ones(3, 2), "V": ones(4)}, "K has 3 rows and V has 4"),
    ("cross_attention:table", "x.npz", {"K": ones(2, 2, 2), "V": ones(4)}, "has shape (2, 2, 2)"),
    ("recommender:table", "x.csv", "user,item\na,1\na,2\n", "no user of three items"),
    ("recommender:table", "x.csv", "user,item\n" + "a,1\n" * 3, "the data hold 1 item"),
]


@pytest.mark.parametrize(("source", "name", "content", "words"), FILES)
def test_a_file_that_no_run_could_use_is_named(tmp_path, source, name, content, words):
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    elif content is not None:
        np.save(path, content)
    config = configured(f"{source},tiny", tmp_path)
    if source == "recommender:table":
        config.data.time = None
    config.data.path = str(path)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)):
        run.check(config)
