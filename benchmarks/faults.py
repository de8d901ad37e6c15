"""The faults that mutation testing plants: one expression of the package is replaced by another.

Messages, types, docstrings and the appearance of plots are not changed.
"""

import ast
import copy
import dataclasses
import random

COMPARISONS = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
FUNCTIONS = {"all": "any", "any": "all", "minimum": "maximum", "maximum": "minimum", "pmin": "pmax", "min": "max"}
FUNCTIONS |= {"max": "min", "zeros_like": "ones_like"}
APPEARANCE = {"alpha", "color", "figsize", "fontsize", "layout", "linestyle", "linewidth", "where"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """An expression, given by two offsets in bytes, and the text that replaces it.

    Attributes:
      lines: the first line of the statement and the last line of the expression.
    """

    module: str
    function: str
    lines: tuple[int, int]
    kind: str
    before: str
    after: str
    span: tuple[int, int]

    def __str__(self):
        return f"{self.module}:{self.lines[1]} {self.function} [{self.kind}] {self.before[:70]} -> {self.after[:70]}"

    def plant(self, source):
        """Returns the source of the module with the fault, as bytes."""
        start, end = self.span
        return source[:start] + self.after.encode() + source[end:]


def find(module, source):
    """Returns all faults that can be planted in a module, given its source as bytes."""
    finder = _Finder(module, source)
    finder.visit(ast.parse(source))
    return finder.faults


def sample(faults, count, seed):
    """Returns at least one fault of each module, and others until there are `count`, in a random order."""
    shuffled = random.Random(seed).sample(faults, len(faults))
    one_each = {fault.module: fault for fault in shuffled}.values()
    chosen = {*list(dict.fromkeys([*one_each, *shuffled]))[: max(count, len(one_each))]}
    return [fault for fault in shuffled if fault in chosen]


class _Finder(ast.NodeVisitor):
    def __init__(self, module, source):
        self.faults = []
        self._module, self._source = module, source
        self._scopes, self._statement = [], None
        self._offsets = [0]
        for line in source.splitlines(keepends=True):
            self._offsets.append(self._offsets[-1] + len(line))

    def visit(self, node):
        if isinstance(node, ast.stmt):
            self._statement = node
        super().visit(node)

    def generic_visit(self, node):
        is_union_of_types = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and not self._scopes
        if not is_union_of_types:
            for kind, new in _replacements(node):
                self._add(node, kind, new)
            super().generic_visit(node)

    def visit_FunctionDef(self, node):
        if not any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
            defaults = filter(None, (*node.args.defaults, *node.args.kw_defaults))
            self._visit_scope(node, [*defaults, *node.body])

    def visit_ClassDef(self, node):
        self._visit_scope(node, node.body)

    def _visit_scope(self, node, children):
        self._scopes.append(node.name)
        for child in children:
            self.visit(child)
        self._scopes.pop()

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_Return(self, node):
        if node.value and ast.unparse(node.value) != "None":
            self._add(node.value, "return", "None")
            self.visit(node.value)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            self._add(node, "statement", "pass")
        self.generic_visit(node)

    def visit_If(self, node):
        if not isinstance(node.test, ast.Compare | ast.UnaryOp):  # _replacements inverts those
            self._add(node.test, "boolean", ast.UnaryOp(ast.Not(), node.test))
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self.visit_If(node)

    def visit_Raise(self, node):
        """Skips messages."""

    def visit_JoinedStr(self, node):
        """Skips messages."""

    def visit_keyword(self, node):
        if node.arg not in APPEARANCE:
            self.generic_visit(node)

    def visit_Call(self, node):
        called = node.func.id if isinstance(node.func, ast.Name) else None
        if called == "cast":  # its first argument is a type
            self.visit(node.args[1])
        elif called in ("TypeVar", "zip"):  # strict= of zip never changes a result
            for child in node.args:
                self.visit(child)
        else:
            self.generic_visit(node)

    def _add(self, node, kind, new):
        start = self._offsets[node.lineno - 1] + node.col_offset
        end = self._offsets[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(self._source[start:end].decode().split())
        after = new if isinstance(new, str) else f"({ast.unparse(new)})"
        function = ".".join(self._scopes) or "module"
        lines = (min(self._statement.lineno, node.lineno), node.end_lineno)
        self.faults.append(Fault(self._module, function, lines, kind, before, after, (start, end)))


def _replacements(node):
    """Yields the kinds of faults that a node can have, each with the new node."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for new in COMPARISONS[type(op)]:
                    yield "comparison", _changed(node, ops=[*ops[:i], new(), *ops[i + 1 :]])
        case ast.BoolOp(op=op):
            yield "boolean", _changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
            yield "operator", operand
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield "operator", _changed(node, op=ARITHMETIC[type(op)]())
        case ast.Constant(value=bool(value)):
            yield "constant", _changed(node, value=not value)
        case ast.Constant(value=int(value) | float(value)):
            for new in dict.fromkeys((value + 1, value - 1, 0)):
                if new != value:
                    yield "constant", _changed(node, value=new)
        case ast.Attribute(attr=name) if name in FUNCTIONS:
            yield "function", _changed(node, attr=FUNCTIONS[name])
        case ast.Name(id=name) if name in FUNCTIONS:
            yield "function", _changed(node, id=FUNCTIONS[name])
        case ast.Call(func=ast.Attribute(attr="where" | "cond"), args=[condition, yes, no, *others]):
            yield "swap", _changed(node, args=[condition, no, yes, *others])
    if isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg and keyword.arg not in APPEARANCE:
                yield "argument", _changed(node, keywords=node.keywords[:i] + node.keywords[i + 1 :])


def _changed(node, **fields):
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
