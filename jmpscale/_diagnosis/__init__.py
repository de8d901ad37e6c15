"""Measures what half precision does to a training step: `diagnose`."""
