"""Draws docs/architecture.svg, the parts of the package and their imports: `python -m benchmarks.architecture`.

A part is a folder, or a module at the top of the package. It stands one floor above the highest part that it imports.
"""

import ast
import graphlib

from benchmarks import record

PACKAGE = record.ROOT / "jmpscale"
PICTURE = record.ROOT / "docs" / "architecture.svg"
WIDTH, BOX, FLOOR = 720, (156, 34), 70  # pixels: of the picture, of a part, and from floor to floor
STYLE = """\
  text { font: 14px sans-serif; text-anchor: middle; fill: #1a1a1a; }
  rect { fill: #eef3fb; stroke: #5b7db1; rx: 6px; }
  path { fill: none; stroke: #9aa7bb; stroke-width: 1.2; marker-end: url(#arrow); }
  @media (prefers-color-scheme: dark) { svg { background: #fff; } }"""


def part(path):
    """Returns the name of the part to which a module belongs."""
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "jmpscale" if name == "__init__" else name


def imports(path):
    """Returns the parts that a module imports."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    found = set()
    for node in nodes:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
        for name, *rest in (module.split(".") for module in modules if module.split(".")[0] == "jmpscale"):
            found.add(rest[0] if rest else name)
    return found - {part(path)}


def house():
    """Returns the parts, and the parts that each imports."""
    below = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        below.setdefault(part(path), set()).update(imports(path))
    return below


def floors(below):
    """Returns the parts of each floor, from the ground up; raises if imports are circular."""
    level = {}
    for name in graphlib.TopologicalSorter(below).static_order():
        level[name] = max((level[other] + 1 for other in below[name]), default=0)
    return [sorted(name for name in level if level[name] == i) for i in range(max(level.values()) + 1)]


def draw(below):
    """Returns the picture as SVG. An arrow leads to each imported part that no other imported part imports."""
    rows = floors(below)
    height = FLOOR * len(rows)
    (width, tall), place = BOX, {}
    for i, row in enumerate(rows):
        for j, name in enumerate(row):
            place[name] = (round(WIDTH * (2 * j + 1) / (2 * len(row))), height - FLOOR * i - FLOOR // 2)
    arrows = []
    for name, others in below.items():
        reached = {far for other in others for far in _reached(below, other)}
        for other in sorted(others - reached):
            (x, y), (u, v) = place[name], place[other]
            middle = (y + v) // 2
            arrows.append(f'  <path d="M{x},{y + tall // 2} C{x},{middle} {u},{middle} {u},{v - tall // 2 - 4}"/>')
    boxes = []
    for name, (x, y) in place.items():
        boxes += [
            f'  <rect x="{x - width // 2}" y="{y - tall // 2}" width="{width}" height="{tall}"/>',
            f'  <text x="{x}" y="{y + 5}">{name}</text>',
        ]
    head = '<path d="M0,0 L8,4 L0,8 z" style="fill: #9aa7bb; stroke: none; marker-end: none"/>'
    marker = f'<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" orient="auto">{head}</marker>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>The parts of the package: each imports only parts below it.</title>",
            f"<style>\n{STYLE}\n</style>",
            f"<defs>{marker}</defs>",
            *arrows,
            *boxes,
            "</svg>\n",
        ]
    )


def _reached(below, name):
    """Returns all parts below a part."""
    return below[name].union(*(_reached(below, other) for other in below[name]))


def main():
    """Writes the picture."""
    PICTURE.write_text(draw(house()))


if __name__ == "__main__":
    main()
