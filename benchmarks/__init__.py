"""Measurements behind the claims of the documentation. Each module is a command that writes its figures to results/."""

import importlib.metadata
import platform


def versions(libraries):
    """Returns the versions of Python and of the named libraries, None for libraries that are not installed."""
    found = {"python": platform.python_version()}
    for name in libraries:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
