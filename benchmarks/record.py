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
LIBRARIES += ("mixed-precision-for-jax", "jax-cuda13-plugin", "jax-rocm60-plugin", "jax-rocm7-plugin")
QUERIES = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")


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


def accelerator(device):
    """Returns the properties of a device of JAX, of its driver and of its memory."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": device.client.local_device_count(),
        "compute_capability": getattr(device, "compute_capability", None),
        "backend": device.client.platform_version,
        "memory_limit": limit,
        "clocks": clocks(),
    }


def clocks():
    """Returns the driver's report on each NVIDIA or AMD GPU, such as its clocks, or None without its command."""
    for command in (["nvidia-smi", f"--query-gpu={','.join(QUERIES)}", "--format=csv"], ["rocm-smi", "--showclocks"]):
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            continue
        if found.returncode == 0:
            return found.stdout.strip().splitlines()
    return None


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
    write(path, read(path) | results)


def write(path, results):
    """Writes results to a file, of which readers see the old or the new content, also if this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    new.replace(path)
