"""A private release of XXᵀ for a matrix X of one's own, whose columns are the records."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

import dpx
from dpx import gram
from dpx._validate import check_choice, check_positive
from dpx.data.arrays import load_array
from dpx.gram.accounting import Columns
from dpx.gram.attend import KERNELS
from dpx.runs import plotting
from dpx.runs.experiment import Comparison, Measure, Outcome, Plan
from dpx.training.keys import open_keys

FAILURE = 0.05  # of the bounds, which hold with high probability
FILE = "gram.dpx"
_MOST_ROWS = 20_000  # XXᵀ takes 3 GB
_BLOCK = 2**22  # entries that are checked at a time


def validate(config) -> None:
    """Raises ValueError or FileNotFoundError for a value or a file that cannot be used."""
    if config.column_bound is None:
        raise ValueError(
            "config.column_bound is missing: set --config.column_bound to a bound on the l2 norm of a column "
            "that is known without looking at the data; longer columns are projected"
        )
    check_positive(config.column_bound, "config.column_bound")
    Columns(config.column_bound, config.max_column_change, config.neighboring)
    check_choice(config.kernel, "config.kernel", KERNELS)
    X = read(config)
    stored = X.T if config.data.transpose else X
    step = max(1, _BLOCK // stored.shape[1])
    if not all(np.isfinite(stored[i : i + step]).all() for i in range(0, len(stored), step)):
        raise ValueError(
            f"{config.data.path}: holds values that are not finite: drop or repair them"
        )


def read(config) -> np.ndarray:
    """X, (n, d), memory-mapped where it is an .npy file."""
    path = config.data.path
    if not path:
        raise FileNotFoundError(
            "config.data.path is missing: set --config.data.path to a .csv, .tsv, .npy or .npz file"
        )
    written = {"header": config.data.header, "separator": config.data.separator}
    X = load_array(path, config.data.array, **written)
    if X.ndim != 2 or not X.size:
        raise ValueError(f"{path}: the array has shape {X.shape}: give a matrix (n, d)")
    X = X.T if config.data.transpose else X
    if len(X) > _MOST_ROWS:
        raise ValueError(
            f"{path}: X has {len(X)} rows, so XXᵀ would have {len(X) ** 2:.1e} entries: where the rows are "
            f"the records, set --config.data.transpose={not config.data.transpose}"
        )
    return X


def plan(config) -> Plan:
    """The release, and what error its noise leaves on an entry of XXᵀ; the number of rows is public."""
    n = len(read(config))
    bounds = config.column_bound, config.max_column_change, config.neighboring
    change = gram.rounded_sensitivity(n, *bounds)
    spent = gram.planned_guarantee(config.epsilon, config.delta, *bounds)
    std = change * dpx.gaussian_noise_multiplier(config.epsilon, config.delta)
    parameters = {
        "rows": n,
        "frobenius_sensitivity": change,
        "noise_std": std,
        "entry_error_bound": gram.gaussian_entry_error(std, n, failure_probability=FAILURE),
    }
    return Plan({"gaussian": spent}, parameters)


def run(config, workdir: Path) -> Outcome:
    """Releases XXᵀ, saves it, and bounds its error without another look at X."""
    X = read(config)
    keys = open_keys(config, workdir, data=[X])
    made = gram.release(
        keys.noise("gaussian"),
        X,
        epsilon=config.epsilon,
        delta=config.delta,
        column_bound=config.column_bound,
        max_column_change=config.max_column_change,
        neighboring=config.neighboring,
    )
    matrix, noise_std = np.asarray(made.matrix), float(made.noise_std or 0.0)
    dpx.save(made, workdir / FILE)
    n = len(matrix)
    entry_error = gram.gaussian_entry_error(noise_std, n, failure_probability=FAILURE)
    # An entry of XXᵀ is not farther from its release than that, so this bound holds with it.
    largest = float(np.abs(matrix).max()) + entry_error
    known = gram.utility_bounds(n, logit_bound=largest, relative_error=entry_error / largest)
    return Outcome(
        measures=[
            Measure("gaussian", "attention_error_bound", known.corrected),
            Measure("gaussian", "entry_error_bound", entry_error),
            Measure("gaussian", "noise_std", noise_std),
            Measure("gaussian", "largest_entry", float(np.abs(matrix).max())),
            Measure("uniform", "attention_error_bound", known.uniform),
        ],
        headline=made.guarantee,
        releases={"gaussian": made.guarantee},
        titles={"gaussian": "Gaussian noise on XXᵀ", "uniform": "uniform attention, no data"},
        headline_row="gaussian",
        comparisons=[Comparison("attention_error_bound", ["uniform"])],
        notes=f"The matrix ({n}, {n}) and its guarantee are in {FILE}: `dpx.load(path).matrix`. With "
        f"probability {1 - FAILURE:g} every entry of it is within entry_error_bound of XXᵀ, and every "
        "attention weight within attention_error_bound; the row uniform is attention with equal weights, "
        "which looks at no data. The bounds follow from the release and cost nothing. Where the bound is "
        "not below that of uniform it promises nothing: a larger ε, or X scaled down together with "
        "column_bound, makes it smaller.",
    )


def load(config, workdir: Path) -> gram.GramRelease:
    """The release of a finished run; FileNotFoundError for one of before, which left gram.npz."""
    del config
    return dpx.load(Path(workdir) / FILE)


def figures(records, folder: Path) -> list[Path]:
    """The released matrix and the attention from it."""
    return [_draw(r, folder / f"gram_{r.workdir.name}.png") for r in records]


def _draw(record, path: Path) -> Path:
    matrix = load(record.config, record.workdir).matrix
    weights = gram.attention(matrix, kernel=record.config["kernel"])
    figure, panels = plotting.pyplot().subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    largest = float(jnp.abs(matrix).max()) or 1.0
    symmetric = {"vmin": -largest, "vmax": largest, "cmap": "RdBu_r"}
    titles = (("release of XXᵀ", matrix, symmetric), ("attention from it", weights, {"vmin": 0.0}))
    for panel, (title, shown, scale) in zip(panels, titles, strict=True):
        image = panel.imshow(shown, **scale)
        panel.set(title=title, xlabel="row of X", ylabel="row of X")
        panel.locator_params(integer=True)
        figure.colorbar(image, ax=panel)
    return plotting.save(figure, path, f"Private Gram matrix, {record.title()}")
