"""Warnings that a compiled program gives while it runs, on request, and the causes of skips that they name."""
