"""Edits a module by the remedy of a diagnosis: the lines that it names compute in float32."""

import ast
import inspect

import jax
import jax.numpy as jnp


def repaired(module, lines, replacements=()):
    """Returns the namespace of a module whose lines, given by their numbers, compute in float32.

    The operands of these lines are converted to float32, and their results back for the other lines that compute with
    them, unless these lines convert them themselves. `replacements` are pairs of a text and another one in its place,
    such as the first value of a loop, which must have the dtype of the next one.
    """
    source = inspect.getsource(module)
    for old, new in replacements:
        assert source.count(old) == 1
        source = source.replace(old, new)
    tree = _Edit(set(lines)).visit(ast.parse(source))
    namespace = {"__name__": module.__name__, **_Arrays().functions()}
    exec(compile(ast.fix_missing_locations(tree), module.__file__, "exec"), namespace)
    return namespace


class _Arrays:
    """What the edited lines call. It knows the arrays that would be in half precision without the edit."""

    def __init__(self):
        self._written = {}

    def functions(self):
        return {"_up": self.up, "_back": self.back, "_kept": self.kept}

    def up(self, x):
        is_half = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return x.astype(jnp.float32) if is_half else x

    def back(self, x):
        return x.astype(self._written[id(x)][1]) if id(x) in self._written else x

    def kept(self, edited, written):
        """Returns the result of the edited expression, given both expressions as functions."""
        with jax.default_matmul_precision("highest"):
            result = edited()
        with jax.numpy_dtype_promotion("standard"):  # the carry of a loop may be in float32
            expected = written()
        for x, like in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            if isinstance(x, jax.Array) and x.dtype != like.dtype:
                self._written[id(x)] = x, like.dtype  # x must not be collected, and its id used again
        return result


class _Edit:
    def __init__(self, lines):
        self._lines = lines

    def _is_named(self, node):
        return bool(self._lines & set(range(node.lineno, node.end_lineno + 1)))

    def _statement(self, node):
        if node.value is None:
            return node
        source = ast.unparse(node.value)
        if self._is_named(node):
            edited, written = _Load("_up", "jnp.float32"), _Load("_back")
            arguments = [ast.parse(f"lambda: ({source})", mode="eval").body for _ in range(2)]
            arguments = [edit.visit(x) for edit, x in zip((edited, written), arguments, strict=True)]
            for argument in arguments:
                ast.increment_lineno(argument, node.lineno - 1)
            node.value = ast.Call(ast.Name("_kept", ast.Load()), arguments, [])
        elif not (isinstance(node, ast.Return) and isinstance(node.value, (ast.Name, ast.Tuple))):  # computes
            node.value = _Load("_back").visit(node.value)
        return node

    def visit(self, node):
        if isinstance(node, ast.Assign | ast.Return | ast.Expr):
            return self._statement(node)
        if isinstance(node, ast.Module | ast.FunctionDef):
            node.body = [self.visit(x) for x in node.body]
        return node


class _Load(ast.NodeTransformer):
    """Calls a function on each variable that is read, and replaces the name of the half-precision dtype."""

    def __init__(self, function, dtype="H"):
        self._function, self._dtype = function, ast.parse(dtype, mode="eval").body

    def visit_Name(self, node):
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.id == "H":
            return self._dtype
        return ast.Call(ast.Name(self._function, ast.Load()), [node], [])

    def visit_Attribute(self, node):
        is_half = ast.unparse(node) == "jnp.float16" and ast.unparse(self._dtype) != "H"
        return self._dtype if is_half else self.generic_visit(node)

    def visit_Call(self, node):
        is_cast = isinstance(node.func, ast.Attribute) and node.func.attr == "astype"
        if is_cast and isinstance(node.func.value, ast.Name):
            node.args = [self.visit(x) for x in node.args]
            return node
        return self.generic_visit(node)
