"""Monitoring of a training run: values to log, statistics of gradients, and what says that a run is stuck.

The rule by which a run is stuck is in `skip_history.py`, and the causes that messages name are in `causes.py`. The rule
has two users: `RunMonitor`, which the user calls between steps, and `CompiledMonitor`, which `with_loss_scaling` calls
inside the compiled step for its option `warn_after_skips`. `gradient_warning.py` is the option `warn_if_not_finite` of
`scaled_backward`.
"""
