"""Recommenders, each of which is made from one private release, and metrics of rankings."""

from dpx.recommend import item_gram, metrics, popularity, transitions

__all__ = ["item_gram", "metrics", "popularity", "transitions"]
