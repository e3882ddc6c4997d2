"""NoisyHead on texts, or on prompts of one's own.

On texts the task is that of Section 7 of arXiv 2504.16000: to predict a document's length from its words.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dpx import noisy_head
from dpx.data import newsgroups
from dpx.data.arrays import load_array
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan, compares
from dpx.training import log
from dpx.training.keys import open_keys
from experiments import checks
from experiments.noisy_head.early_stopping import grid_of, stopped
from experiments.noisy_head.figures import drawer
from experiments.noisy_head.methods import TITLES, check_some, progress

ASSUMPTION = "a record is a prompt of non-empty documents; which documents are empty is public"
TRIED = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # times config.regularization, for the best ridge
# The paper's R is meant for its model of the prompts; here both fits have the valid radius.
HEADLINE = "noisy_head"
FITS = {
    "paper": noisy_head.as_printed(),
    HEADLINE: {"accounting": "last_iterate"},
}


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a bad value, before any text is used."""
    checks.choice(config, "data.source", ("path", "sklearn", "arrays"))
    if config.data.source != "sklearn":
        if not config.data.path:
            raise FileNotFoundError(
                "config.data.path is missing: set --config.data.path to a folder or table of texts, or to "
                "prompts in a .csv, .npy or .npz file, or set --config.data.source=sklearn"
            )
        for path in filter(None, (config.data.path, config.data.public_path)):
            if not Path(path).exists():
                raise FileNotFoundError(f"{path}: no such file or folder; check --config.data.path")
    checks.share(config, "test_fraction")
    check_some(config, "steps_grid")
    checks.each(config, "steps_grid", least=1)
    for name in FITS:
        for descent in descents(name, config):
            descent.calibrate(config.epsilon, config.delta)
    of_arrays = _of_arrays(config)
    one, other = ("texts", "prompts") if of_arrays else ("tables of prompts", "texts")
    for name in ("public_path", "column") if of_arrays else ("header", "separator"):
        if config.data[name] is not None:
            raise ValueError(
                f"config.data.{name}={config.data[name]!r} is for {one}, and {config.data.path} holds "
                f"{other}: leave it out"
            )
    if of_arrays:
        read(config)


def bounds(config) -> noisy_head.HyperParameters:
    """C and G from the config, and the R that is valid for them (see `noisy_head.hyperparameters`)."""
    C, G, decay = config.response_clip, config.feature_radius, config.regularization
    inside = G / (decay + G**2) if decay >= G**2 else 1 / (2 * np.sqrt(decay))
    return noisy_head.HyperParameters(C, G, float(C * inside))


def descents(name: str, config) -> list[noisy_head.Descent]:
    """The fit called `name` at each of its T."""
    hyper = bounds(config)
    decay = (2 if name == "paper" else 1) * config.regularization
    return [
        noisy_head.Descent(
            hyper,
            regularization=config.regularization,
            step_size=config.step_fraction * 2 / (decay + hyper.feature_radius**2),
            steps=steps,
            **FITS[name],
        )
        for steps in grid_of(name, config)
    ]


def plan(config) -> Plan:
    """What a run will release, and noise multipliers at every T."""
    releases, parameters = {}, {}
    for name, grid in _released(config).items():
        for descent in grid:
            multiplier, spent = descent.calibrate(config.epsilon, config.delta)
            releases[Measure(name, "", 0.0, settings={"steps": descent.steps}).place] = spent
            parameters[f"{name}, T={descent.steps}: noise multiplier"] = multiplier
    if compares(config):
        _, releases["one_shot"] = noisy_head.calibrate_one_shot(config.epsilon, config.delta)
    return Plan(releases, parameters)


def _released(config) -> dict[str, list[noisy_head.Descent]]:
    """The fits that a run releases: on one's own data the longest descent alone."""
    if compares(config):
        return {name: grid for name in FITS if (grid := descents(name, config))}
    return {HEADLINE: [max(descents(HEADLINE, config), key=lambda descent: descent.steps)]}


def read(config) -> tuple[noisy_head.Prompts, noisy_head.Prompts]:
    """Training and test prompts; which prompts are test prompts depends on the seed alone."""
    x, y = _own_prompts(config) if _of_arrays(config) else _text_prompts(config)
    tests = max(1, round(config.test_fraction * len(x)))
    if tests >= len(x):
        remedy = "add some" if _of_arrays(config) else "add documents or lower config.length"
        raise ValueError(f"{config.data.path}: {len(x)} prompts leave none to train on: {remedy}")
    train, test = (x[tests:], y[tests:]), (x[:tests], y[:tests])  # NumPy keeps 64 bits
    return noisy_head.Prompts(*train), noisy_head.Prompts(*test)  # type: ignore[arg-type]


def _of_arrays(config) -> bool:
    kind = Path(config.data.path or "").suffix.lower()
    return config.data.source == "arrays" or (
        config.data.source == "path" and kind in (".npy", ".npz")
    )


def _own_prompts(config) -> tuple[np.ndarray, np.ndarray]:
    """x (N, L+1, D) and y (N, L+1), in an order that the seed shuffles."""
    path = config.data.path
    written = {"header": config.data.header, "separator": config.data.separator}
    if Path(path).suffix.lower() == ".npz":
        x, y = load_array(path, "x", **written), load_array(path, "y", **written)
    else:
        table = load_array(path, **written)
        if table.ndim == 2:  # a line a token
            tokens = config.length + 1
            if len(table) % tokens:
                raise ValueError(
                    f"{path}: {len(table)} lines are no whole number of prompts of {tokens} tokens: set "
                    "--config.length to the number of labelled tokens in a prompt"
                )
            table = table.reshape(-1, tokens, table.shape[1])
        if table.ndim != 3 or table.shape[2] < 2:
            raise ValueError(
                f"{path}: has shape {table.shape}: give (N, L+1, D+1), with y in the last column"
            )
        x, y = table[..., :-1], table[..., -1]
    if x.ndim != 3 or x.shape[1] < 2 or y.shape != x.shape[:2]:
        raise ValueError(
            f"{path}: x is {x.shape} and y is {y.shape}: they must be (N, L+1, D) and (N, L+1) with L ≥ 1"
        )
    for name, array in (("x", x), ("y", y)):
        if not np.isfinite(array).all():
            raise ValueError(
                f"{path}: {name} holds values that are not finite: drop or repair those prompts"
            )
    order = np.random.default_rng(config.seed).permutation(len(x))
    return x[order].astype(np.float64), y[order].astype(np.float64)


def _text_prompts(config) -> tuple[np.ndarray, np.ndarray]:
    if config.data.source == "sklearn":
        texts = newsgroups.fetch_newsgroups("train")
        public = newsgroups.fetch_newsgroups("test")
    else:
        texts = newsgroups.load_texts(config.data.path, column=config.data.column)
        if not any(map(newsgroups.tokenize, texts)):
            raise ValueError(
                f"{config.data.path}: holds no word: give texts, or set --config.data.source=arrays for "
                "a table of prompts"
            )
        public = None
        if config.data.public_path:
            public = newsgroups.load_texts(config.data.public_path, column=config.data.column)
    frequencies = newsgroups.document_frequencies(public) if public else None
    prompts = newsgroups.text_prompts(
        texts,
        frequencies,
        dim=config.dim,
        length=config.length,
        typical_tokens=config.typical_tokens,
        log_spread=config.log_spread,
        seed=config.seed,
    )
    return np.asarray(prompts.x), np.asarray(prompts.y)


def run(config, workdir: Path) -> Outcome:
    """Test risks against T, private and not, and the one-shot release."""
    train, test = read(config)
    noise = open_keys(config, workdir, data=map(np.asarray, train)).noise
    hyper, measures, releases = bounds(config), [], {}
    progress(f"{len(train.x)} prompts to train on, {len(test.x)} to test on")
    with jax.enable_x64(True):
        features = noisy_head.featurize(train, response_clip=hyper.response_clip)
        held_out = noisy_head.featurize(test)
        reference = noisy_head.ridge(noisy_head.featurize(train), config.regularization)
        lengths = [np.linalg.norm(part, axis=-1) for part in (features.query, features.context)]
        longer = np.prod(lengths, axis=0) > hyper.feature_radius
        log.say(
            f"{longer.sum()} of {len(longer)} features are longer than config.feature_radius="
            f"{hyper.feature_radius:g}, and are clipped for the private rows",
            shown=True,
        )

        def measure(row, gamma, guarantee=None, **settings):
            excess = noisy_head.empirical_risk(gamma, held_out, reference=reference)
            mse = noisy_head.empirical_risk(gamma, held_out)
            for metric, risk in (("excess_risk", excess), ("test_mse", mse)):
                measures.append(Measure(row, metric, float(risk), settings=settings))
            if guarantee is not None:
                releases[measures[-1].place] = guarantee

        measure("zero", jnp.zeros_like(reference))
        measure("ridge", reference)
        measure("best_ridge", _best_ridge(train, config))
        for name, grid in _released(config).items():
            progress(f"{name}, {len(grid)} values of T")
            keys = jnp.stack([noise(f"steps={descent.steps}/{name}") for descent in grid])
            gammas = jax.jit(stopped(grid, None, config.epsilon, config.delta))(keys, features)
            for descent, gamma in zip(grid, gammas, strict=True):
                _, spent = descent.calibrate(config.epsilon, config.delta)
                measure(name, gamma, spent, steps=descent.steps)
        longest = max(descents(HEADLINE, config), key=lambda descent: descent.steps)
        _, headline = longest.calibrate(config.epsilon, config.delta)
        iterates = noisy_head.gradient_descent(
            features,
            regularization=config.regularization,
            step_size=longest.step_size,
            steps=longest.steps,
            trajectory=True,
        )
        for steps in config.steps_grid:
            measure("not_private", iterates[steps - 1], steps=int(steps))
        if compares(config):
            once = noisy_head.fit_one_shot(
                noise("one_shot"),
                features,
                hyper,
                regularization=config.regularization,
                epsilon=config.epsilon,
                delta=config.delta,
            )
            measure("one_shot", once.gamma, once.guarantee)
    assumed, records = ((), "prompts") if _of_arrays(config) else ((ASSUMPTION,), "documents")
    not_covered = [
        f"the number of {records}, and the test prompts that the risks are computed on",
        "ridge, best_ridge, not_private and every risk in this record: they have no noise, for research",
        "how many features are clipped, which stderr says",
    ]
    if not _of_arrays(config):
        not_covered.append("an author of documents in several prompts")
    return Outcome(
        measures=measures,
        headline=headline.assuming(*assumed),
        releases={place: spent.assuming(*assumed) for place, spent in releases.items()},
        not_covered=not_covered,
        titles=TITLES,
        headline_row=HEADLINE,
        comparisons=[Comparison("test_mse", ["zero"])],
        notes=f"{len(train.x)} prompts to train on, {len(test.x)} to test on. The two ridges and not_private "
        "(descent without noise) are not private; zero predicts zero.",
    )


def _best_ridge(train: noisy_head.Prompts, config) -> jax.Array:
    """Ridge with the λ that predicts a fifth of the training prompts best from the others: not private."""
    count = max(1, len(train.x) // 5)
    asking, rest = (
        noisy_head.featurize(noisy_head.Prompts(train.x[part], train.y[part]))
        for part in (slice(count), slice(count, None))
    )
    risks = {
        decay: float(noisy_head.empirical_risk(noisy_head.ridge(rest, decay), asking))
        for decay in (config.regularization * times for times in TRIED)
    }
    return noisy_head.ridge(noisy_head.featurize(train), min(risks, key=lambda decay: risks[decay]))


figures = drawer(
    "text",
    {"excess_risk": "excess test risk over ridge", "test_mse": "test MSE"},
    x="steps",
    dashed=("zero", "ridge", "not_private"),
)
