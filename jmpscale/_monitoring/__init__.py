"""Monitoring, between steps: values to log, statistics of gradients, and an error for a run that is stuck."""
