"""NoisyHead: differentially private linear attention for in-context regression.

Source: "How Private is Your Attention? Bridging Privacy with In-Context Learning" (arXiv 2504.16000), whose
equations the docstrings cite. Symbols: N prompts of L labelled tokens and a query token in D dimensions;
Γ (D, D) is the head's matrix, Z a prompt's feature matrix, λ the regularization, η the step size, T the
number of steps; C, G and R bound |y|, ‖Z‖_F and ‖Γ‖_F.

There are two private fits: `fit` is Algorithm 1, as printed or repaired, and `fit_one_shot` releases second
moments once, of prompts or of blocks of them. `Descent` describes what `fit` does, and `as_printed()` gives
the options of the paper's own form. All functions compute in float64, in a scope of their own, and return
float64 arrays.
"""

from dpx.noisy_head import moment_sums
from dpx.noisy_head.accounting import Descent, as_printed
from dpx.noisy_head.descent import Fit, fit, gradient_descent, noisy_descent
from dpx.noisy_head.moment_sums import calibrate_one_shot, fit_one_shot, one_shot
from dpx.noisy_head.prediction_error import empirical_risk, population_risk
from dpx.noisy_head.prompts import (
    Features,
    Prompts,
    corrupt,
    featurize,
    predict,
    sample_features,
    sample_prompt,
    sample_prompts,
)
from dpx.noisy_head.second_moments import ridge
from dpx.noisy_head.sensitivity import (
    HyperParameters,
    enforce,
    gradient_sensitivity,
    hyperparameters,
)

__all__ = [
    "Descent",
    "Features",
    "Fit",
    "HyperParameters",
    "Prompts",
    "as_printed",
    "calibrate_one_shot",
    "corrupt",
    "empirical_risk",
    "enforce",
    "featurize",
    "fit",
    "fit_one_shot",
    "gradient_descent",
    "gradient_sensitivity",
    "hyperparameters",
    "moment_sums",
    "noisy_descent",
    "one_shot",
    "population_risk",
    "predict",
    "ridge",
    "sample_features",
    "sample_prompt",
    "sample_prompts",
]
