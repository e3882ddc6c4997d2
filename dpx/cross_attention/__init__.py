"""Differentially private cross-attention: a private memory (K, V), public, adaptive, unlimited queries.

Ke, Liang, Shi, Song, Zhang, "Provable Differentially Private Computation of the Cross-Attention Mechanism"
(arXiv 2407.14717) builds trees; `mechanism="tree"` is theirs with its errata mended. `mechanism="sketch"`, the
default, is one Gaussian release of a linear sketch, with far less noise for the same guarantee.
"""

from dpx.cross_attention import sketch
from dpx.cross_attention.sketch import Sketch

__all__ = ["Sketch", "sketch"]
