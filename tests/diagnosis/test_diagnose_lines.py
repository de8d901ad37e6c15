"""A diagnosis and the warnings of autocast show the user's line of an operation, its module and its pass."""

import inspect
import pathlib
import sysconfig
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jmpscale
from jmpscale._programs import scopes, source

OWN = str(pathlib.Path(jmpscale.__file__).parent)
USER, TRAINER = "/home/user/model.py", "/env/site-packages/trainer/loop.py"
JAX, FLAX = "/env/site-packages/jax/_src/nn.py", "/env/site-packages/flax/linen/linear.py"
STANDARD = f"{sysconfig.get_paths()['stdlib']}/functools.py"


def equation(*files, function="loss"):
    """Returns an equation with frames in some files, the innermost first; the lines are 10, 11 and so on."""
    frames = [SimpleNamespace(file_name=file, line_num=10 + i, function_name=function) for i, file in enumerate(files)]
    return SimpleNamespace(source_info=SimpleNamespace(traceback=SimpleNamespace(frames=frames)))


LINES = {  # the files, the innermost first, and the line that is shown
    "innermost": ((USER, "/home/user/train.py"), "model.py:10 (loss)"),
    "outside of installed packages": ((JAX, FLAX, TRAINER, STANDARD, USER), "model.py:14 (loss)"),
    "in an installed trainer": ((JAX, FLAX, STANDARD, "<frozen runpy>", TRAINER), "trainer/loop.py:14 (loss)"),
    "in a trainer beside the standard library": (
        (FLAX, STANDARD, f"{sysconfig.get_paths()['stdlib']}/site-packages/trainer/loop.py"),
        "trainer/loop.py:12 (loss)",
    ),
    "in dist-packages": (("/usr/lib/python3/dist-packages/optax/a.py", TRAINER), "trainer/loop.py:11 (loss)"),
    "on Windows": (
        ("C:\\env\\site-packages\\jax\\a.py", "C:\\env\\site-packages\\flax\\a.py", USER),
        "model.py:12 (loss)",
    ),
    "in a library only": ((FLAX, STANDARD), ""),
    "in JAX only": ((JAX,), ""),
    "in no file": ((), ""),
    "the scaling": ((JAX, f"{OWN}/_algorithm/scaling.py", USER), "the scaling of the loss"),
    "a cast": ((JAX, inspect.getsourcefile(jmpscale.cast), JAX, USER), "model.py:13 (loss)"),
    "below this package": ((USER, f"{OWN}/_algorithm/grad.py"), "model.py:10 (loss)"),
    "this package is not a user": ((FLAX, f"{OWN}/_algorithm/grad.py", STANDARD, f"{OWN}/_autocast.py"), ""),
    "the demonstration": ((f"{OWN}/__main__.py",), "__main__.py:10 (loss)"),
    "the installed demonstration": (
        (FLAX, "/env/site-packages/jmpscale/__main__.py", TRAINER),
        "__main__.py:11 (loss)",
    ),
    "a name that begins like an installed package": (("/env/site-packages-2/jax/model.py",), "model.py:10 (loss)"),
}


@pytest.mark.parametrize(("files", "line"), LINES.values(), ids=LINES)
def test_line_of_an_operation(files, line):
    assert source.user_lines(equation(*files))[-1:] == ((line,) if line else ())


def test_operation_without_a_traceback_has_no_line():
    assert source.user_lines(SimpleNamespace(source_info=SimpleNamespace(traceback=None))) == ()


FUNCTIONS = {
    "loss": "loss",
    "make.<locals>.loss": "loss",
    "make.<locals>.<lambda>": "make",
    "<lambda>.<locals>.<listcomp>": "<listcomp>",
    "<module>": "<module>",
    "Model.__call__": "Model.__call__",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_line_has_the_innermost_function_with_a_name(function):
    assert source.user_lines(equation(USER, function=function))[-1] == f"model.py:10 ({FUNCTIONS[function]})"


MATHEMATICS = {  # files, and whether the line of the call is shown for their compiled functions
    "/env/site-packages/jax/_src/nn/functions.py": True,
    "/env/site-packages/jax/_src/numpy/linalg.py": True,
    "/env/site-packages/optax/losses/_classification.py": True,
    f"{OWN}/_algorithm/gate.py": False,
    "/env/site-packages/jax/_src/pmap.py": False,
    "/env/site-packages/jax/_src/lax_reference.py": False,
    FLAX: False,
    USER: False,
}


@pytest.mark.parametrize("file", MATHEMATICS)
def test_compiled_functions_of_libraries_have_the_line_of_the_call(file):
    assert source.is_library_function(file) == MATHEMATICS[file]


def test_recomputed_function_is_part_of_the_backward_pass():
    loss = jax.checkpoint(lambda x: jnp.sum(jnp.sin(x) * x))
    eqns = jax.make_jaxpr(jax.grad(loss))(jnp.ones(2)).jaxpr.eqns
    forward = next(eqn for eqn in eqns if eqn.primitive.name == "sin")
    backward = next(eqn for eqn in eqns if eqn.params.get("differentiated"))
    assert [scopes.is_backward(eqn) for eqn in (forward, backward)] == [False, True]


def test_callers_of_a_function_are_omitted():
    eqn = equation(JAX, USER, "/home/user/train.py", "/home/user/main.py")
    lines = ("main.py:13 (loss)", "train.py:12 (loss)", "model.py:11 (loss)")
    assert source.user_lines(eqn) == lines
    assert source.user_lines(eqn, "loss", "/home/user/train.py") == lines[1:]
    assert source.user_lines(eqn, "other", "/home/user/train.py") == lines
