"""The source line and the module of an operation, as reports show them."""

import functools
import pathlib
import re
import sysconfig
from collections.abc import Sequence
from typing import Any

from jax.extend import core

_PACKAGE = pathlib.Path(__file__).parent.parent
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_STANDARD_LIBRARY = str(pathlib.Path(sysconfig.get_paths()["stdlib"])) + "/"
# Packages whose lines say less than the lines of other installed packages that call them.
_LIBRARY = re.compile(_INSTALLED.pattern + r"(?:jax|flax|optax|equinox|haiku|chex|jmpscale)[/\\]")
_JAX = re.compile(_INSTALLED.pattern + r"jax[/\\]")
_MATHEMATICS = re.compile(_INSTALLED.pattern + r"(?:optax|jax[/\\]_src[/\\](?:image|lax|nn|numpy|ops|random|scipy))\b")


def user_line(eqn: core.JaxprEqn) -> str:
    """Returns the user's line of an equation, such as `model.py:41 (mlp)`, or nothing if it has none.

    It is the innermost line outside of installed packages. If all lines are inside of them, as in a framework's own
    trainer, it is the innermost line outside of JAX and of the libraries that define layers and optimizers.
    """
    traceback: Any = eqn.source_info.traceback
    frames = [frame for frame in traceback.frames if not _JAX.search(frame.file_name)] if traceback else []
    if frames and is_own(frames[0].file_name):  # the innermost one
        return "the injected fault" if frames[0].file_name.endswith("testing.py") else "the scaling of the loss"
    for is_library in (_is_installed, _is_library):
        for frame in frames:
            if not is_library(frame.file_name) and not is_own(frame.file_name):
                return _describe(frame.file_name, frame.line_num, frame.function_name)
    return ""


def _describe(file: str, line: int, function: str) -> str:
    names = function.split(".<locals>.")
    name = next((name for name in reversed(names) if not name.startswith("<")), names[-1])
    return f"{pathlib.PurePath(file).name}:{line} ({name})"


@functools.cache
def is_own(file: str) -> bool:
    """Tests whether a file belongs to this package; the demonstration counts as a user's program."""
    return pathlib.Path(file).is_relative_to(_PACKAGE) and not file.endswith("__main__.py")


@functools.cache
def _is_installed(file: str) -> bool:
    if _INSTALLED.search(file):
        return not file.endswith(f"{_PACKAGE.name}/__main__.py")
    return file.startswith((_STANDARD_LIBRARY, "<frozen"))


@functools.cache
def _is_library(file: str) -> bool:
    return _LIBRARY.search(file) is not None or file.startswith((_STANDARD_LIBRARY, "<frozen"))


def is_library_function(file: str) -> bool:
    """Tests whether a file has mathematical functions; other compiled functions, such as pmap's, call user code."""
    return is_own(file) or _MATHEMATICS.search(file) is not None


def scopes(eqn: core.JaxprEqn) -> tuple[Any, ...]:
    """Returns the named scopes and the transformations around an equation, outermost first."""
    name_stack: Any = eqn.source_info.name_stack
    stack = name_stack.stack
    named = [scope for scope in stack if _is_named(scope)]
    half = named[: len(named) // 2]
    # The backward pass of a function with `jax.checkpoint` has the named scopes around it twice.
    if eqn.params.get("differentiated") and named == half + half:
        return *(scope for scope in stack if not _is_named(scope)), *half
    return stack


def _is_named(scope: Any) -> bool:
    return type(scope).__name__ == "Scope"


def module_path(scopes: Sequence[Any]) -> str:
    """Returns the path of the module, such as `encoder/dense_1`, without the scopes that JAX adds."""
    names = [scope.name for scope in scopes if _is_named(scope)]
    return "/".join(name for name in names if name != "rematted_computation" and "->" not in name)


def is_backward(scopes: Sequence[Any]) -> bool:
    """Tests whether an operation is part of a backward pass."""
    return any(not _is_named(scope) and scope.name == "transpose" for scope in scopes)
