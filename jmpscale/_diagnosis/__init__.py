"""Measures what half precision does to a training step: `diagnose` and `diagnose_step`."""
