"""Records the circumstances of a measurement, and adds results to files."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("jmpscale", "jax", "jaxlib", "jax-cuda12-plugin", "libtpu", "optax", "flax", "jmp", "equinox")
LIBRARIES += ("mixed-precision-for-jax",)


def about(module, device):
    """Returns the date, the command, the machine and the versions of a measurement.

    Args:
      module: the name of the module that runs as the command.
      device: the device that was measured, or for which programs were compiled.
    """
    cpu_info = pathlib.Path("/proc/cpuinfo")
    models = [line for line in cpu_info.read_text().splitlines() if "model name" in line] if cpu_info.exists() else []
    return {
        "date": str(datetime.date.today()),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "device": device,
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "commit": _commit(),
        "versions": _versions(),
    }


def _commit():
    """Returns the last commit that changed the package, or None outside a git repository."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "jmpscale"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except FileNotFoundError:
        return None


def _versions():
    """Returns the versions of Python and of the libraries, or None for a library that is not installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def read(path):
    """Returns the results in a file, or an empty dictionary if the file does not exist."""
    return json.loads(path.read_text()) if path.exists() else {}


def add(path, results):
    """Adds results to a file. They replace earlier results with the same names."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(read(path) | results, indent=1) + "\n")
