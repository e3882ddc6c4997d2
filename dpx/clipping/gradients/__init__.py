"""Gradients, read off the program that computes them."""
