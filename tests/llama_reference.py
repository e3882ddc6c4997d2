"""A Llama in slow NumPy, from its definition: one token, one head and one pair of coordinates at a time."""

import numpy as np


def rms_norm(x, scale, epsilon):
    return x / np.sqrt(np.mean(x**2) + epsilon) * scale


def rotate(x, position, theta, factors, pairs):
    """Turns each pair of coordinates of one head."""
    turned = x.copy()
    for index, (i, j) in enumerate(pairs):
        angle = position * theta ** (-2 * index / len(x)) / factors[index]
        turned[i] = x[i] * np.cos(angle) - x[j] * np.sin(angle)
        turned[j] = x[i] * np.sin(angle) + x[j] * np.cos(angle)
    return turned


def logits(tokens, weights, *, heads, kv_heads, theta, epsilon, factors=None):
    """(L, M) logits of one text.

    `weights` holds "embed", "norm", "head" (d, M) and, for each layer, a dict of matrices (in, out), scales.
    Two coordinates of a head that are neighbours form a pair.
    """
    layers, stream = weights["layers"], [weights["embed"][token].astype(float) for token in tokens]
    size = layers[0]["query"].shape[1] // heads
    pairs = [(2 * i, 2 * i + 1) for i in range(size // 2)]
    factors = np.ones(size // 2) if factors is None else factors
    for layer in layers:
        normed = [rms_norm(x, layer["attention_norm"], epsilon) for x in stream]
        after = []
        for t, x in enumerate(stream):
            mixed = []
            for head in range(heads):
                group = head // (heads // kv_heads)
                own, shared = (
                    slice(head * size, (head + 1) * size),
                    slice(group * size, (group + 1) * size),
                )
                query = rotate((normed[t] @ layer["query"])[own], t, theta, factors, pairs)
                scores, values = [], []
                for s in range(t + 1):
                    key = rotate((normed[s] @ layer["key"])[shared], s, theta, factors, pairs)
                    scores.append(query @ key / np.sqrt(size))
                    values.append((normed[s] @ layer["value"])[shared])
                odds = np.exp(np.array(scores) - max(scores))
                mixed.append(sum(p * v for p, v in zip(odds / odds.sum(), values, strict=True)))
            x = x + np.concatenate(mixed) @ layer["out"]
            inner = rms_norm(x, layer["mlp_norm"], epsilon)
            gate = inner @ layer["gate"]
            after.append(x + (gate / (1 + np.exp(-gate)) * (inner @ layer["up"])) @ layer["down"])
        stream = after
    return np.stack([rms_norm(x, weights["norm"], epsilon) @ weights["head"] for x in stream])
