"""NoisyHead (arXiv 2504.16000): private in-context regression by a linear attention head."""

from ml_collections import config_dict

from configs.common import parse_arg

VARIANTS = ("low_dim", "high_dim", "useful", "rates", "early_stopping", "robustness", "text")


def get_config(arg: str = "") -> config_dict.ConfigDict:
    variant, tiny = parse_arg(arg, VARIANTS)
    config = config_dict.ConfigDict()
    config.experiment = "noisy_head"
    config.epsilon = 1.0
    config.delta = 1e-5
    config.seed = 0
    config.noise_seed = config_dict.placeholder(int)
    config.trials = 500
    config.one_shot_trials = 500
    config.kappa = 1.0
    config.noise_std = 0.0
    config.num_prompts = 4000
    config.length = config_dict.placeholder(int)
    config.dim = config_dict.placeholder(int)
    config.regularization = config_dict.placeholder(float)
    config.step_scale = config_dict.placeholder(float)
    config.steps = config_dict.placeholder(int)
    config.steps_exponent = 2.5
    config.methods = ("paper", "repaired", "last_iterate")
    config.epsilons = ()
    config.axes = config_dict.ConfigDict()
    if variant == "low_dim":
        config.dim = 5
        config.regularization = 5.0
        config.step_scale = 3.17 / 5
        config.epsilons = (0.2, 0.4, 0.6, 0.8, 1.0)
        config.axes.num_prompts = (1000, 1500, 2000, 2500, 3000, 3500, 4000)
    elif variant == "high_dim":
        config.step_scale = 0.07
        config.steps = 5
        config.epsilons = (0.01, 0.05, 0.1, 0.5, 1.0)
        config.axes.num_prompts = (500, 600, 700, 800, 900, 1000)
        config.num_prompts = 1000
        config.one_shot_trials = 0
    return config
