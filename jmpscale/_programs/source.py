"""The source line and the module of an operation, as reports show them."""

import functools
import os
import pathlib
import re
import sysconfig
import traceback
from typing import Any

from jax.extend import core

SCALING = "the scaling of the loss"  # shown in place of a line of this package
_PACKAGE = pathlib.Path(__file__).parent.parent
_CAST = str(_PACKAGE / "_cast.py")
# The demonstration counts as a user's program.
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\](?!jmpscale[/\\]__main__)")
# Packages whose lines say less than the lines of other installed packages that call them.
_LIBRARY = re.compile(_INSTALLED.pattern + r"(?:jax|flax|optax|equinox|haiku|chex|jmpscale)[/\\]")
# The layers of these libraries, without the functions that call them, and without the float8 matmuls that Flax gives to
# layers.
_LAYERS = re.compile(
    _INSTALLED.pattern + r"(?:flax[/\\]linen[/\\](?!module|fp8_ops)|flax[/\\]nnx[/\\]nn[/\\]|equinox[/\\]nn[/\\]|"
    r"haiku[/\\]_src[/\\](?:attention|basic|conv|nets|recurrent)\b)"
)
_JAX = re.compile(_INSTALLED.pattern + r"jax[/\\]")
_MATHEMATICS = re.compile(_INSTALLED.pattern + r"(?:optax|jax[/\\]_src[/\\](?:image|lax|nn|numpy|ops|random|scipy))\b")
_PYTHON = (sysconfig.get_paths()["stdlib"] + os.sep, "<frozen")


def user_lines(
    eqn: core.JaxprEqn, function: str = "", file: str = "", depth: int = 0, *, of_call: bool = False
) -> tuple[str, ...]:
    """Returns the user's lines that lead to an equation, such as `model.py:41 (mlp)`, outermost first.

    They are the lines outside of installed packages. If all lines are inside them, as in a framework's own trainer,
    they are the lines outside of JAX and of the libraries that define layers and optimizers. If `function` is among
    them, its callers are omitted: JAX traces a compiled function once, so its equations show the first call. A `depth`
    of 1 adds the lines in other installed packages, and 2 also the lines of layers in libraries.

    An operation of this package has the line `SCALING`; if `of_call`, the lines of its callers.
    """
    frames = _frames(eqn)
    if not of_call and frames and is_own(frames[0].file_name) and not _is_in_cast(eqn):
        return (SCALING,)
    nearest = min((_distance(frame.file_name) for frame in frames), default=2)
    users = [frame for frame in frames if _distance(frame.file_name) <= max(nearest, depth)] if nearest < 2 else []
    calls = [i for i, x in enumerate(users) if (x.file_name, x.function_name.rpartition(".")[2]) == (file, function)]
    inside = users[: calls[-1] + 1] if calls else users
    return tuple(_describe(x.file_name, x.line_num, x.function_name) for x in reversed(inside))


def _is_in_cast(eqn: core.JaxprEqn) -> bool:
    """Tests whether an equation is the conversion of an array by `jmpscale.cast`."""
    frames = _frames(eqn)
    return bool(frames) and frames[0].file_name == _CAST


def _frames(eqn: core.JaxprEqn) -> list[Any]:
    """Returns the frames of an equation outside of JAX, innermost first."""
    found: Any = eqn.source_info.traceback
    return [frame for frame in found.frames if not _is_in_jax(frame.file_name)] if found else []


@functools.cache
def _is_in_jax(file: str) -> bool:
    return _JAX.search(file) is not None


@functools.cache
def _describe(file: str, line: int, function: str) -> str:
    names = function.split(".<locals>.")
    name = next((name for name in reversed(names) if not name.startswith("<")), names[-1])
    installed = _INSTALLED.search(file)
    shown = file[installed.end() :].replace("\\", "/") if installed else pathlib.PurePath(file).name
    return f"{shown}:{line} ({name})"


def place_of_error(error: BaseException) -> str:
    """Returns the innermost line of the user that an error comes from, as ` at model.py:41 (mlp)`; or an empty text."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if _distance(x.filename) == 0]
    return f" at {_describe(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name)}" if frames else ""


def is_installed(line: str) -> bool:
    """Tests whether a line, such as `package/model.py:41 (mlp)`, is in an installed package."""
    return "/" in line.partition(":")[0]


@functools.cache
def is_own(file: str) -> bool:
    """Tests whether a file belongs to this package; the demonstration counts as a user's program."""
    return pathlib.Path(file).is_relative_to(_PACKAGE) and not file.endswith("__main__.py")


@functools.cache
def _distance(file: str) -> int:
    """Returns 0 for a file of the user, 1 for an installed package, 2 for layers of a library, and 3 for the rest."""
    if _INSTALLED.search(file):
        return 2 if _LAYERS.search(file) else 3 if _LIBRARY.search(file) else 1
    return 3 if is_own(file) or file.startswith(_PYTHON) else 0


def is_library_function(file: str) -> bool:
    """Tests whether a file has mathematical functions, which call no function of the user."""
    return _MATHEMATICS.search(file) is not None
