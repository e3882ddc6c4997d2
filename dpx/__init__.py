"""dpx: differentially private attention in JAX."""
