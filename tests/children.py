"""Processes that tests start: none is left behind, whatever happens."""

import subprocess
import sys


def start(*command, **options):
    """Starts Python with these arguments, and its output in pipes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *map(str, command)], text=True, **pipes | options)


def end(process, timeout=100):
    """Waits for a process and returns what it wrote; kills it if that takes too long."""
    try:
        return ("", "") if process.returncode is not None else process.communicate(timeout=timeout)
    finally:
        process.kill()
        process.wait()
