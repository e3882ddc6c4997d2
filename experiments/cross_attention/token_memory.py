"""Hidden states of documents as a private memory: keys, next tokens as values, a document as the unit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx._numerics import into_ball
from dpx.cross_attention import Domain, PolynomialFeatures, Sketch
from dpx.cross_attention.sketch.sums import with_mass
from dpx.data.embedding import Projection, fit_projection
from dpx.noise import release
from dpx.privacy import ADD_OR_REMOVE_ONE, PrivacyGuarantee, gaussian_noise_multiplier
from dpx.training import users
from experiments import guarantees
from experiments.dp_transformer import documents as docs
from experiments.dp_transformer.documents import Documents


class Positions(NamedTuple):
    """Positions of documents: what is attended from, and what came next.

    Attributes:
      keys: (n, L, dim) unit vectors.
      classes: (n, L), the number of the next token among the frequent ones, or theirs for all others.
      mask: (n, L), of positions that are a document's own.
    """

    keys: np.ndarray
    classes: np.ndarray
    mask: np.ndarray

    @property
    def asked(self) -> np.ndarray:
        """(m, dim), the keys of the positions that count."""
        return self.keys[self.mask]


class Reader(NamedTuple):
    """What public documents define: a projection of hidden states, and the frequent tokens."""

    projection: Projection
    frequent: np.ndarray

    def __call__(self, states: np.ndarray, documents: Documents) -> Positions:
        keys = np.stack([self.projection(own) for own in states])
        keys = np.asarray(into_ball(jnp.asarray(keys), 1.0))
        number = {token: i for i, token in enumerate(self.frequent)}
        other = len(self.frequent)
        classes = [[number.get(token, other) for token in row] for row in documents.tokens]
        return Positions(keys, np.array(classes), documents.mask)


def fit_reader(states: np.ndarray, public: Documents, dim: int, num_classes: int) -> Reader:
    """The leading directions of public hidden states, half whitened, and the public frequent tokens."""
    tokens, counts = np.unique(public.tokens[public.mask], return_counts=True)
    if len(tokens) < num_classes:
        raise ValueError(
            f"config.num_classes={num_classes} must be at most the {len(tokens)} tokens of public documents: "
            "use fewer, or a larger config.public"
        )
    frequent = tokens[np.argsort(-counts, kind="stable")][:num_classes]
    return Reader(fit_projection(states[public.mask], dim), frequent)


class Total(NamedTuple):
    """A sum over documents, (r, classes), the norm of a document's part of it, and the features φ."""

    sums: np.ndarray
    l2_clip_norm: float
    features: PolynomialFeatures


def clipped_sum(config, rows: Positions, public: Positions, degree: int) -> Total:
    """Σ φ(k) ⊗ v over the rows of each document, clipped, and summed over documents.

    A document that comes or goes moves the sum by no more than the clipping norm, which is a quantile of the
    norms of public documents.
    """
    features = PolynomialFeatures(config.dim, degree, 1 / config.largest_logit)
    num_classes = config.num_classes + 1
    phi = jax.jit(features.__call__)

    def sums(positions: Positions):
        for keys, classes, mask in zip(*positions, strict=True):
            yield np.asarray(phi(keys), np.float64).T @ (
                np.eye(num_classes)[classes] * mask[:, None]
            )

    bound = float(np.quantile([np.linalg.norm(x) for x in sums(public)], config.clip_quantile))
    total = np.zeros((features.num_features, num_classes))
    for found in sums(rows):
        total += found * min(1.0, bound / max(float(np.linalg.norm(found)), 1e-12))
    return Total(total, bound, features)


def release_memory(config, key: jax.Array, total: Total) -> Sketch:
    """The memory of a clipped sum, as one Gaussian release."""
    noisy = release(
        key,
        total.sums,
        sensitivity=total.l2_clip_norm * (1 + 1e-6),
        noise_multiplier=gaussian_noise_multiplier(config.epsilon, config.delta),
        label=f"memory of {total.features.num_features} features",
    )
    return as_sketch(config, total._replace(sums=noisy))


def as_sketch(config, total: Total) -> Sketch:
    """Sums as a memory that answers. They are private where no noise was added to them."""
    domain = Domain(
        kind="ball",
        dim=config.dim,
        value_dim=config.num_classes + 1,
        key_bound=1.0,
        query_bound=1.0,
        value_bound=1.0,
        scale=1 / config.largest_logit,
        value_domain="simplex",
        neighboring=ADD_OR_REMOVE_ONE,
    )
    words = (
        f"Gaussian sketch of {total.features.num_features} taylor features, any number of queries"
    )
    spent = guarantee(config, words)
    sums = jnp.pad(jnp.asarray(total.sums, jnp.float32), ((0, 0), (1, 0)))
    moments = with_mass(sums, 0, total.features, domain)
    std = gaussian_noise_multiplier(config.epsilon, config.delta) * total.l2_clip_norm
    return Sketch(moments, total.features, domain, None, std, spent)


def guarantee(config, mechanism: str) -> PrivacyGuarantee:
    """Of one release of a memory."""
    budget, unit = (config.epsilon, config.delta), docs.unit(config)
    assumed = ("the pretrained model and the public documents do not depend on the data",)
    assumed += (users.ASSUMPTION,) if unit == "user" else ()
    return guarantees.gaussian(*budget, mechanism, unit, assumptions=assumed)


def exact_attention(rows: Positions, num_classes: int, logit: float):
    """Exact attention to all rows, each on its own, without privacy."""
    classes = rows.classes[rows.mask]
    order = np.argsort(classes, kind="stable")
    keys, (present, starts) = rows.asked[order], np.unique(classes[order], return_index=True)

    def answer(queries: np.ndarray) -> np.ndarray:
        found = np.zeros((len(queries), num_classes))
        for start in range(0, len(queries), 512):
            part = slice(start, start + 512)
            weights = np.exp(logit * (queries[part] @ keys.T - 1))
            found[part, present] = np.add.reduceat(weights, starts, axis=1)
        return found / found.sum(1, keepdims=True)

    return answer
