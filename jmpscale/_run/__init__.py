"""Measures what half precision does to a training run: `diagnose_run`."""
