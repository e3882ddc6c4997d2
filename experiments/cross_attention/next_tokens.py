"""A language model with a private memory: what a pretrained model expects, mixed with what private texts had.

Khandelwal et al., "Generalization through Memorization" (arXiv 1911.00172), from a release. A position of a
private document is a row of the memory: the key is the model's last hidden state there, projected to a unit
vector by what public documents say, and the value the next token, one-hot over the tokens that are frequent
in public documents and one class for all others. The document is the unit: its rows are summed, the sum is
clipped, and one Gaussian release of all sums is the memory.
"""

import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx.cross_attention import Sketch
from dpx.privacy import gaussian_noise_multiplier
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan, compares
from dpx.training import keys as secrets
from experiments import checks
from experiments.cross_attention.token_memory import (
    Positions,
    as_sketch,
    clipped_sum,
    exact_attention,
    fit_reader,
    guarantee,
    release_memory,
)
from experiments.dp_transformer import documents as docs
from experiments.dp_transformer import tuned_text
from experiments.dp_transformer.documents import Documents
from experiments.dp_transformer.tuned_text import Language

RELEASE = "memory.dpx"
SHARES = np.linspace(0, 0.9, 19)  # of the memory in the mixture; public documents choose one
TITLES = {
    "pretrained": "the model alone",
    "memory": "with the private memory",
    "frequencies": "with private frequencies, a memory of degree 0",
    "memory_no_noise": "with the memory, clipped and without noise",
    "frequencies_no_noise": "with frequencies, clipped and without noise",
    "public_attention": "with exact attention to the public documents alone",
    "both": "with both, the public documents and the private memory",
    "attention": "with exact attention, neither clipped nor private",
}
NOT_COVERED = [
    "the rows memory_no_noise, frequencies_no_noise and attention, which are not private",
    "nats, which are of held-out documents",
    "temperature, clipping and numbers of dimensions and classes, which were chosen on this public data set",
    "whatever of these documents the pretraining of the model has seen",
]


class Asked(NamedTuple):
    """Positions with what the model alone expects there, of the m that count.

    Attributes:
      positions: Where the memory is asked.
      log_next: (m,), log-probability of the token that came next.
      rest: (m,), probability of all tokens that are not frequent.
    """

    positions: Positions
    log_next: np.ndarray
    rest: np.ndarray


class Cost(NamedTuple):
    """Nats of a token, and the memory's share of the mixture."""

    nats: float
    share: float


def validate(config) -> None:
    """Raises ValueError, FileNotFoundError or ModuleNotFoundError for what cannot be used."""
    docs.check(config)
    if config.data.user is not None and config.data.record == "window":
        raise ValueError(
            "config.data.record='window' must be another one with config.data.user: all texts of a user are "
            "one record here"
        )
    if config.data.path is not None and config.data.test_path is None:
        raise ValueError(
            "config.data.test_path is missing: give later documents, of which the first config.public are no "
            "secret; those of config.data.path are private"
        )
    tuned_text.check(config)
    checks.integers(config, "dim", "num_classes", "public", "draws")
    checks.positive(config, "largest_logit", "exact_logit")
    checks.each(config, "degree", least=0, even=True)
    checks.share(config, "clip_quantile")
    language = tuned_text.build(config)
    if (model := language.model()).first_adapted < model.settings.num_layers:
        raise ValueError(
            f"config.tune.target_modules={config.tune.target_modules} must be (), and config.tune.shift "
            "True: states are what the whole model makes of a text"
        )
    _, later = docs.load(config, language.tokenizer, joined=True)
    if config.public >= len(later):
        raise ValueError(
            f"config.public={config.public} must be less than the {len(later)} later documents, of which the "
            "others ask: use a smaller number or a larger config.data.test_limit"
        )


def plan(config) -> Plan:
    """What a run will release, the size of the memory, and its noise for each unit of a clipped norm."""
    spent = guarantee(config, "Gaussian sketch")
    parameters = {
        "noise_multiplier": gaussian_noise_multiplier(config.epsilon, config.delta),
        "features": math.comb(config.degree + config.dim, config.dim),
    }
    labels = [_label(name, draw) for name in _degrees(config) for draw in range(_draws(config))]
    return Plan(dict.fromkeys(labels, spent), parameters)


def _degrees(config) -> dict[str, int]:
    """The released memories by row, with their degrees."""
    return {"memory": config.degree} | ({"frequencies": 0} if compares(config) else {})


def _draws(config) -> int:
    """How often each memory is released: more than once only to measure the noise."""
    return config.draws if compares(config) else 1


def _label(name: str, draw: int) -> str:
    return f"{name}_draw{draw}" if draw else name


def run(config, workdir: Path) -> Outcome:
    """Nats a token of held-out documents, with a memory and without."""
    language = tuned_text.build(config)
    private, later = docs.load(config, language.tokenizer, joined=True)
    synthetic = config.data.path is None and bool(config.data.generated)
    known, asks = slice(config.public), slice(config.public, None)
    # Keys, classes and clipping norm follow from the public documents and the model.
    begun = (*private.arrays, *later.take(known).arrays, *tuned_text.model_files(config))
    keys = secrets.open_keys(config, workdir, synthetic=synthetic, data=begun)
    states = np.asarray(tuned_text.trunk(language, later), np.float32)
    reader = fit_reader(states[known], later.take(known), config.dim, config.num_classes)
    public, asking = (
        Asked(
            reader(states[half], later.take(half)),
            *expect(language, states[half], later.take(half), reader.frequent),
        )
        for half in (known, asks)
    )
    print("public documents are read", flush=True)
    rows = reader(np.asarray(tuned_text.trunk(language, private), np.float32), private)
    joined = with_public(config, public, asking)
    releases, costs, memories = {}, {"both": []}, []
    for name, degree in _degrees(config).items():
        total = clipped_sum(config, rows, public.positions, degree)
        costs[f"{name}_no_noise"] = [cost(public, asking, as_sketch(config, total).query)]
        costs[name] = []
        for draw in range(_draws(config)):
            label = _label(name, draw)
            memory = release_memory(config, keys.noise(label), total)
            costs[name].append(cost(public, asking, memory.query))
            releases[label] = memory.guarantee
            if name == "memory":
                costs["both"].append(cost(*joined, memory.query))
            memories.append(memory)
    costs["attention"] = [
        cost(public, asking, exact_attention(rows, config.num_classes + 1, config.exact_logit))
    ]
    measures = [
        Measure(name, "nats_per_token", float(-asked.log_next.mean()))
        for name, asked in (("pretrained", asking), ("public_attention", joined[1]))
    ]
    for name, found in costs.items():
        nats = [one.nats for one in found]
        measures.append(Measure(name, "nats_per_token", float(np.mean(nats))))
        if len(nats) > 1:
            error = float(np.std(nats, ddof=1) / np.sqrt(len(nats)))
            measures.append(Measure(name, "standard_error", error))
        measures.append(Measure(name, "share", float(np.mean([one.share for one in found]))))
    dpx.save(memories[0], Path(workdir) / RELEASE)
    return Outcome(
        measures=measures,
        headline=releases["memory"],
        releases=releases | {"both": releases["memory"]},
        composed=releases,  # the row both reads the release of the row memory
        not_covered=NOT_COVERED,
        titles=TITLES,
        headline_row="memory",
        comparisons=[
            Comparison("nats_per_token", ["pretrained", "frequencies", "public_attention"])
        ],
        synthetic=synthetic,
        notes=f"Means over {_draws(config)} release(s), each of which costs the whole budget. The share is "
        "the memory's part of the mixture, chosen on public documents.",
    )


def load(config, workdir: Path) -> Sketch:
    """The released memory of a finished run; the private file is not read."""
    del config
    return dpx.load(Path(workdir) / RELEASE)


def expect(language: Language, states: np.ndarray, documents: Documents, frequent):
    """What the model alone expects: `log_next` and `rest` of `Asked`."""
    model = language.model()

    @jax.jit
    def run(states, tokens):
        logs = jax.nn.log_softmax(model.logits(states.astype(model.dtype)))
        log_next = jnp.take_along_axis(logs, tokens[..., None], axis=-1)[..., 0]
        return log_next, 1 - jnp.exp(logs[..., frequent]).sum(-1)

    pieces = [run(*pair) for pair in zip(states, documents.tokens, strict=True)]
    log_next, rest = (np.stack(part)[documents.mask] for part in zip(*pieces, strict=True))
    return log_next.astype(np.float64), np.clip(rest.astype(np.float64), 1e-6, 1.0)


def cost(public: Asked, asking: Asked, answer) -> Cost:
    """What asking documents cost with the share of the memory that is best on public ones."""
    share = best_share(public, answer)
    given = np.asarray(answer(asking.positions.asked))
    return Cost(float(mixed(asking, given, share).mean()), share)


def with_public(config, public: Asked, asking: Asked) -> tuple[Asked, Asked]:
    """The model mixed with exact attention to public documents, as if that were the model.

    The first half of the public documents stands for all of them where the second half chooses a share: no
    document is asked about itself.
    """
    rows, half = public.positions, len(public.positions.mask) // 2
    first, second = (
        Positions(*(x[part] for x in rows)) for part in (slice(half), slice(half, None))
    )
    count = first.mask.sum()
    others = Asked(second, public.log_next[count:], public.rest[count:])
    about = config.num_classes + 1, config.exact_logit
    share = best_share(others, exact_attention(first, *about))

    def join(asked: Asked, memory: Positions) -> Asked:
        given = exact_attention(memory, *about)(asked.positions.asked)
        rest = (1 - share) * asked.rest + share * given[:, -1]
        return Asked(asked.positions, -mixed(asked, given, share), rest)

    return join(others, first), join(asking, rows)


def best_share(asked: Asked, answer) -> float:
    """Of the memory in the mixture, where these cost least."""
    given = np.asarray(answer(asked.positions.asked))
    nats = [mixed(asked, given, share).mean() for share in SHARES]
    return float(SHARES[int(np.argmin(nats))])


def mixed(asked: Asked, answers: np.ndarray, share: float) -> np.ndarray:
    """Nats of each position, where the memory's classes (m, classes) have a share of the mixture.

    Within the class of all other tokens the model's odds stand: their ratios do not change.
    """
    classes = asked.positions.classes[asked.positions.mask]
    given = np.take_along_axis(answers, classes[:, None], axis=1)[:, 0].astype(np.float64)
    other = answers.shape[1] - 1
    within = np.where(classes == other, np.exp(asked.log_next) / asked.rest, 1.0)
    return -np.log((1 - share) * np.exp(asked.log_next) + share * given * within)
