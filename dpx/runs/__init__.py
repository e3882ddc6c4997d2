"""The launcher of configured experiments. Nothing else in dpx imports it."""
