"""The source line and the module of an operation, as `range_report` shows them."""

import functools
import pathlib
import re

from jax.extend import core, source_info_util

_PACKAGE = str(pathlib.Path(__file__).parent)
_FRAME = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::\d+)? \((?P<function>.*)\)")
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:jax|flax|optax|equinox|haiku|chex|jmpscale)[/\\]")
_MATHEMATICS = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?:optax|jax[/\\]_src[/\\](?:image|lax|nn|numpy|ops|random|scipy))\b"
)
_TRANSFORMATION = re.compile(r"\b(?:jvp|transpose|vmap|pmap|shard_map|checkpoint|remat|linearize)\(([^()]*)\)")
_NOT_A_MODULE = re.compile(
    r"|(?:p?jit|core_call|closed_call|custom_[jv]{2,3}p?_call|checkpoint|rematted_computation|remat2?|while|body|cond"
    r"|scan|shard_map|[^/]*->.*|branch_\d+_fun|xla_pmap|jvp|vmap|transpose)(?:\(.*\))?"
)


def user_line(eqn: core.JaxprEqn) -> str:
    """Returns the user's line of an equation, such as `model.py:41 (mlp)`, or nothing if it has none."""
    return _user_line(source_info_util.summarize(eqn.source_info, num_frames=100))


@functools.lru_cache(maxsize=10_000)
def _user_line(summary: str) -> str:
    frames = [match for match in map(_FRAME.fullmatch, summary.splitlines()) if match]  # outermost first
    users = [frame for frame in frames if not _is_library(frame["file"])]
    if not users:
        return ""
    names = users[-1]["function"].split(".<locals>.")
    function = next((name for name in reversed(names) if not name.startswith("<")), names[-1])
    return f"{pathlib.PurePath(users[-1]['file']).name}:{users[-1]['line']} ({function})"


def is_own(file: str) -> bool:
    """Tests whether a file belongs to this package."""
    return file.startswith(_PACKAGE)


def _is_library(file: str) -> bool:
    if is_own(file):
        return not file.endswith("__main__.py")
    return _LIBRARY.search(file) is not None


def is_library_function(file: str) -> bool:
    """Tests whether a file contains mathematical functions; other compiled functions, such as pmap's, call users'."""
    return is_own(file) or _MATHEMATICS.search(file) is not None


@functools.lru_cache(maxsize=10_000)
def module_path(scope: str) -> str:
    """Returns the path of the module, such as `encoder/dense_1`, without the names of transformations."""
    previous = ""
    while previous != scope:
        previous, scope = scope, _TRANSFORMATION.sub(r"\1", scope)
    return "/".join(part for part in scope.split("/") if not _NOT_A_MODULE.fullmatch(part))
