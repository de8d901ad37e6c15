"""A training step as a function of values, and its state."""
