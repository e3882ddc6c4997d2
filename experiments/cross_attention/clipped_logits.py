"""Decoding with clipped logits: answers in words with private texts in the prompt, each of which is paid for.

    python -m experiments.cross_attention.clipped_logits
    python -m experiments.cross_attention.clipped_logits --language_model=folder --asked=40 --examples=4

InvisibleInk (arXiv 2507.02974), with one word for an answer. Each text that asks has B private texts of its
own. The model reads each of these, with its label, before the text. How far that moves the log-odds of the
labels' words is clipped to [-c, c], summed and divided by B; a private text that is not there moves nothing.
The answer is drawn from the softmax of the public log-odds and this mean, divided by a temperature T. A
private text that comes or goes moves two log-odds by 2c / (B T) at most, relative to one another. As it
stands in one prompt, c = ε B T / 2 makes all answers together (ε, 0)-DP to add or remove a text. N private
texts answer N / B others, and no more.

What is printed is the expected accuracy of such answers, at several T. Nothing is drawn and nothing is
released: who draws needs an exact sampler, and lots for who stands in which prompt.
"""

from typing import Any

import numpy as np
from absl import app, flags
from scipy.special import softmax

from configs import cross_attention
from experiments.cross_attention import answers, labelled
from experiments.dp_transformer import labelled_texts

ASKED = flags.DEFINE_integer("asked", 400, "texts that are answered", lower_bound=1)
EXAMPLES = flags.DEFINE_integer("examples", 8, "B, private texts for each of them", lower_bound=1)
MODEL = flags.DEFINE_string(
    "language_model", None, "folder or GGUF file; SmolLM2-135M-Instruct by default"
)
TINY = flags.DEFINE_bool("tiny", False, "made-up texts and a random model, to try that it runs")
EPSILONS = (0.5, 1.0, 3.0)
TEMPERATURES = (0.03, 0.1, 0.3, 1.0)


def shares(base: np.ndarray, moved: np.ndarray, clip: float, temperature: float) -> np.ndarray:
    """The probabilities (n, words) of answers, from log-odds.

    Args:
      base: (n, words), without private texts.
      moved: (n, B, words), how far each of B private texts moves them.
      clip: Of each entry of `moved`.
      temperature: By which the sum is divided.
    """
    return softmax((base + np.clip(moved, -clip, clip).mean(1)) / temperature, axis=1)


def clip_norm(epsilon: float, num_examples: int, temperature: float) -> float:
    """The largest clip whose answers are (ε, 0)-DP to add or remove one of the private texts."""
    return epsilon * num_examples * temperature / 2


def main(argv: list[str]) -> None:
    del argv
    config: Any = cross_attention.get_config("sentences,tiny" if TINY.value else "sentences")
    config.language.update({"kind": "random" if TINY.value else "pretrained", "path": MODEL.value})
    private, later = labelled_texts.load(config)
    public, asking = (later.take(part) for part in labelled.halves(config, later))
    count, each = ASKED.value, EXAMPLES.value
    if count * each > len(private) or count > len(asking):
        raise app.UsageError(
            f"--asked={count} must be at most {len(asking)}, and with --examples={each} at most "
            f"{len(private) // each}: each private text stands in one prompt"
        )
    read, words = answers.reader(config.language), tuple(config.language.words)

    def odds(*texts) -> np.ndarray:
        found = read(*texts)
        return found - found.mean(1, keepdims=True)

    texts, truth = asking.texts[:count], asking.labels[:count]
    alone = odds(texts)
    base = answers.answered(alone, odds(public.texts))
    shown = np.random.default_rng(0).permutation(len(private))[: count * each]
    examples = [(private.texts[i], words[private.labels[i]]) for i in shown]
    asked = [text for text in texts for _ in range(each)]
    moved = odds(asked, examples).reshape(count, each, -1) - alone[:, None]

    def right(answer: np.ndarray) -> str:
        hit = answer[np.arange(count), truth]
        return f"{hit.mean():.3f} ± {hit.std() / count**0.5:.3f}"

    likeliest = np.eye(len(words))
    print(f"Accuracy on {count:,} texts, {each} private texts for each\n")
    print("| | " + " | ".join(f"ε = {epsilon:g}" for epsilon in EPSILONS) + " |")
    print("|---" * (len(EPSILONS) + 1) + "|")
    for title, row in {
        "the model alone": alone,
        "the model alone, less its mean over public texts": base,
        "that, with the private texts, neither clipped nor drawn": base + moved.mean(1),
    }.items():
        print(f"| {title} " + f"| {right(likeliest[row.argmax(1)])} " * len(EPSILONS) + "|")
    for temperature in TEMPERATURES:
        cells = [
            right(shares(base, moved, clip_norm(epsilon, each, temperature), temperature))
            for epsilon in EPSILONS
        ]
        print(f"| clipped logits, drawn at T = {temperature:g} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    app.run(main)
