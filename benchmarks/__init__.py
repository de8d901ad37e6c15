"""Measurements behind the claims of the documentation. Each module is a command that writes its figures to results/."""
