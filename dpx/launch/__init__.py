"""Runs configured experiments: nothing else in dpx imports it."""
