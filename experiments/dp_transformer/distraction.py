"""Table 1, attention distraction on synthetic keys and in a private model, and maps of attention."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpx import attention, reattention
from dpx.data import Histories, synthetic_histories
from dpx.reattention import Moments, ParameterNoise
from dpx.runs import plotting
from dpx.runs.experiment import Measure, Outcome, Plan
from dpx.training import keys as secrets
from experiments import checks, lines
from experiments.dp_transformer import models, training

UNIT = "user"
ASSUMPTIONS = (
    "the catalogue of items is public",
    "the number of users, which set the sampling probability, the batch size and δ, is public",
)
NOT_COVERED = [
    "training loss and realised batch sizes (metrics.jsonl, config.log, the progress line)",
    "the ratios, distances and maps of attention, which are computed on training sequences",
]
ATTENTIONS = ("plain", "reattention", "literal")
TITLES = {
    "one_key": "one noisy synthetic key",
    "dp_reattention": "private model under fresh noise",
    "relu": "Table 1, relu",
    "gelu": "Table 1, gelu",
}
ACTIVATIONS = {
    "relu": (reattention.relu, jax.nn.relu),
    "gelu": (reattention.gelu, lambda x: jax.nn.gelu(x, approximate=False)),
}


def validate(config) -> None:
    """Raises ValueError for a value that cannot be used."""
    checks.integers(config, "data.num_users", "data.num_items", "draws", "sequences")
    checks.integers(config, "table.samples", "one_key.dim", "one_key.length", "one_key.samples")
    checks.integers(config, "data.length", least=2)
    checks.each(config, "table.stds", "one_key.logit_variances", least=0)
    models.check(config, config.data.num_items)
    training.check_both(config, config.data.num_users)
    if not config.reattention.enabled:
        raise ValueError("config.reattention.enabled=False leaves nothing to measure: switch it on")
    if config.sequences > config.data.num_users or not config.noise_scale >= 0:
        raise ValueError(
            "config.sequences must be at most data.num_users, and noise_scale at least 0"
        )
    training.warn_about_delta(config.delta, config.data.num_users)


def plan(config) -> Plan:
    """What a run will release, without training."""
    trained, parameters = models.plan(config, config.data.num_users, UNIT, prior=None)
    return Plan({"dp_reattention": trained["dp_reattention"]}, parameters)


def run(config, workdir: Path) -> Outcome:
    """All three parts; the arrays behind the figure go to reattention.npz."""
    arrays: dict[str, np.ndarray] = {}
    measures = [*_table(config), *_synthetic_keys(config, arrays)]
    keys = secrets.open_keys(config, workdir, synthetic=True)
    histories = _histories(config)
    tokens = np.stack(histories.items).astype(np.int32)
    calibrated = models.calibrate(
        config,
        histories,
        config.data.length,
        UNIT,
        ASSUMPTIONS,
        prior=None,
        correction_key=keys.noise("token probabilities"),
    )
    assert calibrated.noise is not None
    graph, params = nnx.split(
        models.build(config, config.data.num_items, config.data.length, config.seed)
    )

    def loss(params, tokens, key):
        model = nnx.merge(graph, params)
        logits = model(tokens[:-1], dropout_key=key, noise_std=calibrated.noise)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], axis=1).mean()

    trained = training.train(
        loss,
        params,
        (tokens,),
        config.train,
        keys=keys,
        label="dp_reattention",
        workdir=workdir,
        privacy=calibrated.privacy,
        mesh=config.mesh,
    )
    models.save(workdir, trained, calibrated.noise)
    shown = jnp.asarray(tokens[: config.sequences])
    measures += _fresh_noise(config, graph, trained, calibrated.noise, shown, arrays)
    np.savez(workdir / "reattention.npz", allow_pickle=False, **arrays)
    return Outcome(
        measures=measures,
        headline=calibrated.guarantee,
        releases={"dp_reattention": calibrated.guarantee},
        synthetic=True,
        not_covered=NOT_COVERED,
        notes="The numbers of a noisy key, and the ratios, are the expected attention under fresh noise over "
        "that without noise: 1 is no distraction. Deciles are of the keys' variance; the distance is the "
        "total variation to attention without noise.",
        titles=TITLES,
        headline_row="dp_reattention",
    )


def _histories(config) -> Histories:
    data = config.data
    return synthetic_histories(data.num_users, data.length, data.num_items, seed=config.seed)


def _table(config) -> list[Measure]:
    """Table 1: variance after an activation, in closed form and sampled."""
    measures = []
    draws = np.random.default_rng(config.seed).normal(size=config.table.samples)
    for name, (propagate, activation) in ACTIVATIONS.items():
        for std in config.table.stds:
            analytic = float(propagate(Moments(jnp.zeros(1), jnp.full(1, std**2))).var[0])
            sampled = float(np.asarray(activation(jnp.asarray(std * draws)), np.float64).var())
            for metric, value in (("analytic_variance", analytic), ("sampled_variance", sampled)):
                measures.append(Measure(name, metric, value, settings={"std": std}))
    return measures


def _synthetic_keys(config, arrays: dict) -> list[Measure]:
    """E[S] of one noisy key among others that are not, for a fixed query, over what it is without noise."""
    dim, length = config.one_key.dim, config.one_key.length
    query_key, key_key, noise_key = jax.random.split(jax.random.key(config.seed), 3)
    q = jax.random.normal(query_key, (1, dim))
    k = jax.random.normal(key_key, (length, dim))
    noise = jax.random.normal(noise_key, (config.one_key.samples, dim))
    clean = attention.attention_weights(q, k)[0, 0]
    measures = []
    for variance in config.one_key.logit_variances:
        # A logit's variance is |q|² times the key's over D.
        of_key = variance * dim / float(jnp.square(q).sum())
        noisy = jnp.broadcast_to(k, (len(noise), *k.shape)).at[:, 0].add(of_key**0.5 * noise)
        per_key = jnp.zeros((length, 1)).at[0].set(of_key)
        for name, weights in _weights(q, noisy, per_key).items():
            ratio = float(weights[:, 0, 0].mean() / clean)
            measures.append(Measure("one_key", name, ratio, settings={"logit_variance": variance}))
    arrays["keys_variance"] = np.array(config.one_key.logit_variances)
    for name in ATTENTIONS:
        curve = [m.value for m in measures if m.metric == name]
        arrays[f"keys_{name}"] = np.array(curve)
    return measures


def _weights(q, k, key_variance, mask=None) -> dict[str, jax.Array]:
    """Attention's weights without correction, and with it in both forms."""
    return {
        "plain": attention.attention_weights(q, k, mask=mask),
        "reattention": reattention.attention_weights(q, k, key_variance, mask=mask),
        "literal": reattention.attention_weights(q, k, key_variance, renormalize=False, mask=mask),
    }


def _fresh_noise(config, graph, params, noise_std: ParameterNoise, tokens, arrays) -> list[Measure]:
    """What fresh noise of the effective size in the same parameters does to attention, first block.

    The query is that of the last position without noise; E[S_i] is the average over the draws.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    scale = config.noise_scale

    def noisy(key):
        leaves = []
        for index, (path, leaf) in enumerate(flat):
            in_table = "embedding" in jax.tree_util.keystr(path)
            std = noise_std.embedding[:, None] if in_table else noise_std.rest
            draw = jax.random.normal(jax.random.fold_in(key, index), leaf.shape)
            leaves.append(leaf + scale * std * draw)
        return jax.tree.unflatten(structure, leaves)

    def first_block(params):
        """Queries, keys and key variances (N, heads, L, ·)."""
        model, seen = nnx.merge(graph, params), []

        def spying(q, k, v, key_variance, *, mask):
            seen.append((q, k, jnp.broadcast_to(key_variance, (*k.shape[:-1], 1))))
            return reattention.attend(q, k, v, key_variance, mask=mask)

        for block in model.blocks:
            block.attention = spying
        model(tokens, noise_std=noise_std)
        return seen[0]

    q, clean_keys, _ = jax.jit(first_block)(params)
    last = q[..., -1:, :]

    @jax.jit
    def scores(key):
        _, k, key_variance = first_block(noisy(key))
        return _weights(last, k, key_variance), key_variance[..., 0]

    clean = attention.attention_weights(last, clean_keys)[..., 0, :]
    totals = {name: jnp.zeros_like(clean) for name in ATTENTIONS}
    variance = jnp.zeros_like(clean)
    for number in range(config.draws):
        weights, drawn = scores(jax.random.fold_in(jax.random.key(config.seed), number))
        totals = {name: totals[name] + weights[name][..., 0, :] / config.draws for name in totals}
        variance += drawn / config.draws
    edges = np.quantile(variance, np.linspace(0, 1, 11))
    decile = np.clip(np.searchsorted(edges, np.asarray(variance), side="right") - 1, 0, 9)
    arrays["trained_variance"] = np.array([variance[decile == d].mean() for d in range(10)])
    measures = []
    for name, total in totals.items():
        ratio = np.asarray(total / clean)
        curve = np.array([ratio[decile == d].mean() for d in range(10)])
        arrays[f"trained_{name}"] = curve
        distance = float(jnp.abs(total - clean).sum(-1).mean() / 2)
        for metric, value in (
            ("ratio, lowest decile", curve[0]),
            ("ratio, highest decile", curve[-1]),
            ("distance to noiseless", distance),
        ):
            about = {"measured": metric}
            measures.append(Measure("dp_reattention", name, float(value), settings=about))
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    maps = _weights(*jax.jit(first_block)(params), mask=causal)
    for name in ATTENTIONS[:2]:
        arrays[f"map_{name}"] = np.asarray(maps[name][0, 0])
    return measures


def figures(records, folder: Path) -> list[Path]:
    """Distraction against variance, and a map of attention for each record's ε."""
    records = sorted(records, key=lambda record: record.config["epsilon"])
    loaded = [(r, Path(r.workdir) / "reattention.npz") for r in records]
    loaded = [(r, np.load(path)) for r, path in loaded if path.exists()]
    if not loaded:
        return []
    panels = []
    for part, row, of in (("keys", "one_key", "logit"), ("trained", "dp_reattention", "key")):
        points = [
            lines.Point(Measure(name, "E[S] / S", float(y)), float(x), words)
            for record, arrays in (loaded[:1] if part == "keys" else loaded)  # ε is of the trained
            for words in ("" if part == "keys" else f"ε = {record.config['epsilon']:g}",)
            for name in ATTENTIONS
            for x, y in zip(arrays[f"{part}_variance"], arrays[f"{part}_{name}"], strict=True)
        ]
        panels.append(lines.Panel(points, f"variance of the {of}", "E[S] / S", TITLES[row]))
    titles = {name: name for name in ATTENTIONS}
    path = folder / "distraction.png"
    distraction = lines.draw(path, "Attention that noise draws", panels, titles)
    return [distraction, _draw_maps(loaded, folder)]


def _draw_maps(loaded, folder: Path) -> Path:
    """Maps of the private model's attention, with and without the correction, and their difference."""
    size = len(loaded)
    figure, grid = plotting.pyplot().subplots(
        3, size, figsize=(3.2 * size + 0.8, 8), squeeze=False, layout="constrained"
    )
    plain, corrected = ([a[f"map_{name}"] for _, a in loaded] for name in ATTENTIONS[:2])
    difference = [b - a for a, b in zip(plain, corrected, strict=True)]
    largest = max(float(np.abs(d).max()) for d in difference) or 1.0
    weight = {"vmin": 0, "vmax": 1, "cmap": "viridis"}
    signed = {"vmin": -largest, "vmax": largest, "cmap": "RdBu_r"}
    rows = (
        ("plain", plain, "weight", weight),
        ("Re-Attention", corrected, "weight", weight),
        ("Re-Attention - plain", difference, "difference", signed),
    )
    for axes, (title, maps, label, style) in zip(grid, rows, strict=True):
        for axis, (record, _), weights in zip(axes, loaded, maps, strict=True):
            image = axis.imshow(weights, **style)
            axis.set_title(f"{title}, ε = {record.config['epsilon']:g}", fontsize=9)
            axis.set(xlabel="key", ylabel="query")
        figure.colorbar(image, ax=list(axes), label=label)
    return plotting.save(figure, folder / "attention_maps.png", "Attention of the private model")
