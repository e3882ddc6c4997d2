"""A character model that starts from nothing, on the documents on which `finetune` tunes a pretrained one."""

import dataclasses
from pathlib import Path

from ml_collections import ConfigDict

from dpx.data import Texts
from dpx.data import text as own
from dpx.nn import pretrained
from dpx.runs.experiment import Outcome, Plan
from experiments import checks
from experiments.dp_transformer import corpus as corpora
from experiments.dp_transformer import documents as docs
from experiments.dp_transformer import language_model
from experiments.dp_transformer.corpus import Corpus

figures = language_model.figures
load = language_model.load


def validate(config) -> None:
    """Raises ValueError, FileNotFoundError or ModuleNotFoundError for what cannot be used."""
    docs.check_kind(config.tokenizer, "tokenizer", "bytes")
    checks.integers(config, "data.tokens")
    docs.check(config)
    language_model.check(config, _corpus(config))


def plan(config) -> Plan:
    """What a run will release, without training."""
    return language_model.plan(config, _corpus(config))


def run(config, workdir: Path) -> Outcome:
    """Trains the model and measures nats per character, over the characters that `finetune` counts."""
    return language_model.run(config, workdir, _corpus(config))


def _corpus(config) -> Corpus:
    """The characters of each document's first tokens. Where it was cut is no end, and is not predicted."""
    tokenizer = docs.Bytes()
    if config.tokenizer.kind == "pretrained":
        tokenizer = pretrained.tokenizer(config.tokenizer.path or pretrained.default_path())
    shorter = {**config.data.to_dict(), "length": config.data.tokens}
    in_tokens = ConfigDict({**config.to_dict(), "data": shorter})
    known = corpora.public(config)

    def records(part: docs.Documents) -> Texts:
        texts = [own.Text("", text) for text in part.texts(tokenizer)]
        found = own.encode(texts, known.alphabet, config.data.length)
        return dataclasses.replace(found, ends=False, users=part.users)

    train, test = docs.load(in_tokens, tokenizer)
    longest = max(map(len, test.texts(tokenizer)))
    if longest > config.data.length:
        raise ValueError(
            f"config.data.length={config.data.length} must be at least {longest}: a test document has that "
            "many characters, and all of them are measured"
        )
    return Corpus(records(train), records(test), known)
