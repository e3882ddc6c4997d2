"""The main job: a transformer that learns surnames, and nobody's surname.

There are 88,799 surnames of the US census, of which 8,000 are held out; ε = 3 and δ = 1e-5 for adding or
removing one name of the others. The transformer has d = 64, 2 blocks and a tied embedding. It is trained
by DP-SGD with normalised gradients and stands beside DP n-grams and a run without privacy.

    python -m experiments.run --config=configs/quickstart.py --workdir=runs/quickstart
    python -m experiments.run --config=configs/quickstart.py --workdir=runs/quickstart_reattention \\
        --config.reattention.enabled --config.non_private.steps=0

The second command adds a row with Re-Attention at the same budget. `--config.model.kind=gru` (or lstm)
trains the recurrent baselines. Expect 2.24 nats per character, and 2.15 without privacy, after 255 s of CPU;
the table is in experiments/dp_transformer/README.md.
"""

from typing import Any

from ml_collections import ConfigDict, config_dict

from configs import text
from configs.common import non_private, parse_arg, reattention

MEANINGS = text.MEANINGS | {
    "data.held_out": "names to measure on",
    "model.mlp_dim": "width of the layer inside a block",
}


def get_config(arg: str = "") -> ConfigDict:
    _, tiny = parse_arg(arg)
    config: Any = text.get_config(arg)
    config.epsilon, config.reattention = 3.0, reattention()
    config.data = {
        "kind": "surnames",
        "path": config_dict.placeholder(str),
        "held_out": 200 if tiny else 8000,
        "split_seed": 0,
        "limit": 2000 if tiny else 0,
    }
    # As many names as the private row reads. The start and the rate were chosen by training names.
    config.non_private = non_private(steps=1600, batch_size=512, learning_rate=1e-2)
    config.model.mlp_dim = 32 if tiny else 128
    del config.train.records_per_user
    if tiny:
        config.train.update({"steps": 6, "batch_size": 128, "microbatch_size": 64})
        config.non_private.update({"steps": 4, "batch_size": 128})
    else:
        config.model.num_heads = 1
        config.train.update({"steps": 400, "batch_size": 2048, "microbatch_size": 128})
        config.prior.order, config.ngrams = 4, (1, 2, 3, 4)
    return config


def sweep(arg: str = "") -> dict[str, list]:
    parse_arg(arg)
    return {"epsilon": [1.0, 3.0, 8.0, 16.0], "seed": [0, 1]}
