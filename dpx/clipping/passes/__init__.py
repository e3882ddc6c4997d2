"""How a batch is clipped."""
