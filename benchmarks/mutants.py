"""Do the tests bite? Faults are planted in the package, one at a time. Run with `python -m benchmarks.mutants`.

A mutant is the package with one expression changed. It is killed if a test fails, and survives if none does; each
survivor is listed in the results with the reason why it may. One process imports the libraries, but starts no device;
for each mutant it forks a child that runs pytest on a copy of the repository: first those of the tests run by the
README's command that are about the mutant's room, in front the ones that have killed a mutant of the same function;
then, for what survives, those that only `--full` runs, and some on a single device. Work that was interrupted is taken
up again. Compiled programs are kept: one that a mutant does not change is compiled once, not once for each mutant. The
mutants are a sample with a fixed seed, of every function at least one.

Not mutated: texts, types, docstrings, overloads, `strict=` of zip, which asserts what always holds, and how pictures
look.
"""

import argparse
import ast
import contextlib
import copy
import datetime
import hashlib
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import random
import shutil
import signal
import sys
import time
import traceback

import pytest

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = pathlib.Path(__file__).parent / "results" / "mutants.json"
# The tests that should notice a fault in a room, in this order; its doctests come first.
SUBJECTS = {
    "_scaling": ["test_scaling", "test_update", "test_bad_use", "test_devices", "test_training", "test_gate"],
    "_finite": [
        "test_finite",
        "test_devices",
        "test_bad_use",
        "test_parallel_training",
        "test_properties",
        "test_gate",
    ],
    "_tree": ["test_tree", "test_any_tree", "test_scaling", "test_step", "test_optax", "test_bad_use", "test_state"],
    "_gate": ["test_gate", "test_eager", "test_step", "test_any_tree", "test_bad_use", "test_training", "test_devices"],
    "_step": ["test_step", "test_like_jax", "test_gate", "test_bad_use", "test_devices"],
    "_optax": ["test_optax", "test_gate", "test_tree", "test_bad_use", "test_devices", "test_training"],
    "_state": ["test_state", "test_update", "test_exchange", "test_bad_use", "test_report", "test_tree"],
    "_report": ["test_grad_report", "test_report", "test_bad_use"],
    "_exchange": [
        "test_exchange",
        "test_torch_checkpoints",
        "test_bad_use",
        "test_conformance",
        "test_damaged_checkpoints",
    ],
    "testing": ["test_testing", "test_bad_use", "test_devices", "test_processes"],
    "plots": ["test_plots"],
}
MODULES = tuple(SUBJECTS)
STAGES = {  # name: (simulated devices, test files or None for those of SUBJECTS, options)
    "default": (8, None, []),
    "full": (8, None, ["--full", "-m", "full"]),
    "one device": (1, ["test_finite", "test_properties"], []),
}
HANGING = 600  # seconds, after which a run counts as failed
HEAVY = 2.0  # seconds; what takes longer comes last
LIBRARIES = ("jax", "jaxlib", "optax", "flax", "numpy", "pytest", "hypothesis")
IMPORTED_ONCE = ["chex", "equinox", "flax.linen", "flax.nnx", "flax.training.train_state", "hypothesis.strategies"]
IMPORTED_ONCE += ["jax.experimental.checkify", "jax.experimental.sparse", "matplotlib.pyplot", "optax"]
IMPORTED_ONCE += ["orbax.checkpoint"]
PYTEST = ["-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]

# --- the mutants

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
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
}
FUNCTIONS = {"all": "any", "any": "all", "minimum": "maximum", "maximum": "minimum", "pmin": "pmax", "min": "max"}
FUNCTIONS |= {"max": "min", "zeros_like": "ones_like"}
LOOKS = {"alpha", "color", "figsize", "fontsize", "layout", "linestyle", "linewidth", "where"}  # of a picture


def changes(node):
    """Yields pairs of an operator's name and what it puts in the place of an expression."""

    def altered(**fields):
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for new in COMPARISONS[type(op)]:
                    yield "comparison", altered(ops=[*ops[:i], new(), *ops[i + 1 :]])
        case ast.BoolOp(op=op):
            yield "boolean", altered(op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield "boolean", operand
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "arithmetic", operand
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield "arithmetic", altered(op=ARITHMETIC[type(op)]())
        case ast.Constant(value=bool(value)):
            yield "constant", altered(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (
                ("number", altered(value=new)) for new in dict.fromkeys((value + 1, value - 1, 0)) if new != value
            )
        case ast.Attribute(attr=name) if name in FUNCTIONS:
            yield "function", altered(attr=FUNCTIONS[name])
        case ast.Name(id=name) if name in FUNCTIONS:
            yield "function", altered(id=FUNCTIONS[name])
        case ast.Call(func=ast.Attribute(attr="where" | "cond"), args=[condition, yes, no, *others]):
            yield "swap", altered(args=[condition, no, yes, *others])
    if isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg and keyword.arg not in LOOKS:
                yield "argument dropped", altered(keywords=node.keywords[:i] + node.keywords[i + 1 :])


class Finder(ast.NodeVisitor):
    """Collects the mutants of a module, each as a dict that tells where, what and how."""

    def __init__(self, module):
        self.module, self.path, self.found = module, [], []
        self.source = (ROOT / "jmpscale" / f"{module}.py").read_bytes()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.functions = []
        for node in ast.parse(self.source).body:
            self.first = self.starts[node.lineno - 1]
            text = self.source[self.first : self.starts[node.end_lineno]]
            self.unit = hashlib.sha256(text).hexdigest()[:12]  # of the function or statement that the mutant is in
            self.visit(node)

    def add(self, node, operator, new):
        """Records that the text of `node` is replaced by that of `new`, in brackets if it is an expression."""
        start, end = (
            self.starts[r - 1] + c for r, c in [(node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)]
        )
        text = new if isinstance(new, str) else f"({ast.unparse(new)})"
        before = " ".join(self.source[start:end].decode().split())
        mutant = {"module": self.module, "function": ".".join(self.path) or "module", "line": node.lineno}
        mutant |= {"operator": operator, "before": before, "after": text, "span": [start, end]}
        mutant["id"] = f"{self.module} {self.unit} {start - self.first} {end - self.first} {text}"
        self.found.append(mutant)

    def visit_FunctionDef(self, node):
        if any("overload" in ast.unparse(d) for d in node.decorator_list):
            return
        self.path.append(node.name)
        self.functions.append(".".join(self.path))
        for inner in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(inner)
        self.path.pop()

    def visit_ClassDef(self, node):
        self.path.append(node.name)
        for inner in [*node.decorator_list, *node.body]:
            self.visit(inner)
        self.path.pop()

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_Return(self, node):
        if node.value:
            self.add(node.value, "return", "None")
            self.visit(node.value)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            self.add(node, "statement", "pass")
        self.generic_visit(node)

    def visit_If(self, node):
        if not isinstance(node.test, ast.Compare | ast.UnaryOp):  # those have mutants that do the same
            self.add(node.test, "boolean", ast.UnaryOp(ast.Not(), node.test))
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self.visit_If(node)

    def visit_Raise(self, node):
        """Leaves texts alone."""

    def visit_JoinedStr(self, node):
        """Leaves texts alone."""

    def visit_keyword(self, node):
        if node.arg not in LOOKS:
            self.generic_visit(node)

    def visit_Call(self, node):
        called = node.func.id if isinstance(node.func, ast.Name) else None
        if called == "cast":
            self.visit(node.args[1])
        elif called in ("TypeVar", "zip"):
            for inner in node.args:
                self.visit(inner)
        else:
            self.generic_visit(node)

    def generic_visit(self, node):
        if not self.path and isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return  # a union of types
        for operator, new in changes(node):
            self.add(node, operator, new)
        super().generic_visit(node)


def sample(finders, count, seed):
    """Returns at least one mutant of each function, and others at random until there are `count`, in order."""
    everything = [mutant for finder in finders for mutant in finder.found]
    shuffled = everything[:]
    random.Random(seed).shuffle(shuffled)
    of_each = {(m["module"], m["function"]): m for m in reversed(shuffled)}
    chosen = [*of_each.values(), *(m for m in shuffled if m is not of_each[m["module"], m["function"]])]
    chosen = {id(m) for m in chosen[: max(count, len(of_each))]}
    return [m for m in everything if id(m) in chosen]


# --- running tests on them


class Watch:
    """A pytest plugin: orders tests by how likely and how quickly they kill, and records what they did."""

    def __init__(self, first, files, seconds, leave_out):
        self.first, self.files, self.seconds, self.leave_out = first, files, seconds, leave_out
        self.failed, self.took, self.passed, self.clock = [], {}, 0, sum(os.times()[:4])

    def pytest_collection_modifyitems(self, config, items):
        """Sorts, and leaves out what fails without a mutant."""
        kept = [item for item in items if item.nodeid not in self.leave_out]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.leave_out])

        def place(item):
            killed = self.first.index(item.nodeid) if item.nodeid in self.first else len(self.first)
            file = self.files.index(item.path.stem) if item.path.stem in self.files else -1  # -1: doctests
            seconds = self.seconds.get(item.nodeid, 0.0)
            return killed, seconds > HEAVY, file, seconds

        items[:] = sorted(kept, key=place)

    def pytest_runtest_logreport(self, report):
        """Notes how much of the processor a test took, its own processes included, and whether it failed."""
        before, self.clock = self.clock, sum(os.times()[:4])
        self.took[report.nodeid] = self.took.get(report.nodeid, 0.0) + self.clock - before
        self.passed += report.passed and report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report):
        """Notes that a file could not even be read."""
        if report.failed:
            self.failed.append(report.nodeid)


def in_child(work, options, watch, devices):
    """Runs pytest on the copy in a forked child; returns what its plugin saw, or why there is nothing."""
    report = work / "report.json"
    report.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(work / "log.txt", "wb") as log:
            os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        os.chdir(work / "copy")
        sys.path.insert(0, str(work / "copy"))
        os.environ |= {"PYTHONPATH": str(work / "copy"), "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        sys.dont_write_bytecode = True  # a stale one would hide the next mutant
        try:
            code = int(pytest.main([*PYTEST, *options], plugins=[watch]))
            seen = {"failed": watch.failed, "took": watch.took, "passed": watch.passed, "code": code}
            report.write_text(json.dumps(seen))
        finally:
            sys.stderr.flush()
            traceback.print_exc()
            os._exit(0)
    end = time.monotonic() + HANGING
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.02)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return {"failed": ["timeout"], "code": 1}
    return json.loads(report.read_text()) if report.exists() else {"failed": ["crash"], "code": 1}


class Runner:
    """Knows the copy, the stages, and what a run without a mutant looks like."""

    def __init__(self, work, modules):
        self.modules = modules
        self.work, self.seconds, self.left_out, self.killers = work, {}, {}, {}
        shutil.rmtree(work / "copy", ignore_errors=True)
        junk = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "notebooks")
        shutil.copytree(ROOT, work / "copy", ignore=junk)

    def run(self, stage, mutant=None):
        """Runs the tests of a stage: up to the first that fails, or without a mutant all of them."""
        devices, files, chosen = STAGES[stage]
        module, function = (mutant["module"], mutant["function"]) if mutant else (None, None)
        modules = [module] if mutant else self.modules
        doctests = [] if files or chosen else [f"jmpscale/{m}.py" for m in modules]
        files = files or list(dict.fromkeys(file for m in modules for file in SUBJECTS[m]))
        options = [*chosen, *(f"tests/{file}.py" for file in files), *["-x"] * bool(mutant), *doctests]
        left_out = self.left_out.get(stage, set())
        first = self.killers.get((module, function), [])
        watch = Watch(first, files, self.seconds.get(stage, {}), left_out)
        return in_child(self.work, options, watch, devices)

    def learn(self, stage):
        """Runs a stage without a mutant: all must pass, save on one device what asks for several."""
        for last in (False, True):
            start = time.monotonic()
            seen = self.run(stage)
            counts = f"{seen.get('passed', 0)} passed, {len(seen['failed'])} failed"
            print(f"without a mutant, {stage}: {counts}, {time.monotonic() - start:.0f} s", flush=True)
            if not seen.get("passed") or (seen["failed"] and (last or STAGES[stage][0] > 1)):
                raise SystemExit(f"tests fail without a mutant: {seen['failed'][:5]}; see {self.work / 'log.txt'}")
            self.seconds[stage] = seen["took"]
            self.left_out.setdefault(stage, set(seen["failed"]))
            if not seen["failed"]:
                break

    def judge(self, mutant, stages):
        """Returns the stage and the test that killed a mutant, or two times None."""
        target = self.work / "copy" / "jmpscale" / f"{mutant['module']}.py"
        source = target.read_bytes()
        start, end = mutant["span"]
        target.write_bytes(source[:start] + mutant["after"].encode() + source[end:])
        try:
            for stage in stages:
                seen = self.run(stage, mutant)
                if seen["code"] == pytest.ExitCode.USAGE_ERROR:  # pytest's word for a package that does not import
                    seen["failed"] = ["import"]
                if seen["code"] and not seen["failed"]:
                    raise SystemExit(f"pytest ended with {seen['code']} and no failed test; see {self.work}/log.txt")
                if seen["failed"]:
                    killer = seen["failed"][0]
                    known = self.killers.setdefault((mutant["module"], mutant["function"]), [])
                    if "::" in killer and killer not in known:
                        known.append(killer)
                    return stage, killer
        finally:
            target.write_bytes(source)
        return None, None


# --- the command


def summary(finders, chosen, verdicts):
    """Counts by module and function, and lists the survivors with the reasons that the last results gave for them."""
    reasons = {}
    if RESULTS.exists():
        for old in json.loads(RESULTS.read_text())["survivors"]:
            reasons[old["module"], old["function"], old["before"], old["after"]] = old["why"]
    modules = {}
    for finder in finders:
        functions = {}
        for name in dict.fromkeys(m["function"] for m in finder.found):
            ours = [m for m in chosen if (m["module"], m["function"]) == (finder.module, name)]
            stages = [verdicts[m["id"]]["stage"] for m in ours]
            exist = sum(m["function"] == name for m in finder.found)
            counts = {"by default": stages.count("default"), "killed": len(ours) - stages.count(None)}
            functions[name] = {"exist": exist, "run": len(ours)} | counts
        without = sorted(set(finder.functions) - set(functions))
        if without:
            raise SystemExit(f"{finder.module}: functions without a mutant: {without}")
        totals = {key: sum(f[key] for f in functions.values()) for key in ("exist", "run", "by default", "killed")}
        modules[finder.module] = totals | {"functions": functions}
    survivors = []
    for mutant in chosen:
        if verdicts[mutant["id"]]["stage"] is None:
            shown = {k: v for k, v in mutant.items() if k not in ("span", "id")}
            why = reasons.get((mutant["module"], mutant["function"], mutant["before"], mutant["after"]), "")
            survivors.append(shown | {"why": why})
    return modules, survivors


def main():
    """Plants faults, runs tests, and writes the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=400, help="how many mutants (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument(
        "--modules", nargs="+", default=MODULES, choices=MODULES, help="of which modules (default: all)"
    )
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES, help="which tests (default: all)")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build" / "mutants", help="folder for the work")
    parser.add_argument("--again", action="store_true", help="try the survivors of an earlier run again")
    parser.add_argument("--list", action="store_true", help="only show the mutants")
    options = parser.parse_args()
    finders = [Finder(module) for module in MODULES]
    chosen = [m for m in sample(finders, options.count, options.seed) if m["module"] in options.modules]
    if options.list:
        print(*map(show, chosen), sep="\n")
        print(len(chosen), "of", sum(len(f.found) for f in finders))
        return
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for module in IMPORTED_ONCE:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    jax = sys.modules["jax"]
    jax.config.update("jax_compilation_cache_dir", str(work / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    verdicts = judge_all(chosen, options, work)
    if set(options.modules) == set(MODULES):
        write(finders, chosen, verdicts, options)


def judge_all(chosen, options, work):
    """Returns the verdict on each mutant; those of earlier runs on the same function hold, and each is kept at once."""
    record = work / "verdicts.jsonl"
    verdicts = {}
    for line in record.read_text().splitlines() if record.exists() else []:
        old = json.loads(line)
        if old["stage"] or (set(options.stages) <= set(old["stages"]) and not options.again):
            verdicts[old["id"]] = old
    left = [m for m in chosen if m["id"] not in verdicts]
    runner = Runner(work, options.modules)
    for stage in options.stages if left else []:
        runner.learn(stage)
    for done, mutant in enumerate(left, 1):
        start = time.monotonic()
        stage, killer = runner.judge(mutant, options.stages)
        about = {"stage": stage, "killer": killer, "stages": options.stages}
        verdicts[mutant["id"]] = mutant | about
        with record.open("a") as file:
            file.write(json.dumps(mutant | about) + "\n")
        said = f"killed by {killer}" if stage else "SURVIVED"
        print(f"{done}/{len(left)} {time.monotonic() - start:.1f} s {show(mutant)}: {said}", flush=True)
    return verdicts


def show(mutant):
    """Returns a mutant in one line."""
    place = f"{mutant['module']}:{mutant['line']} {mutant['function']}"
    return f"{place} [{mutant['operator']}] {mutant['before'][:70]} -> {mutant['after'][:70]}"


def write(finders, chosen, verdicts, options):
    """Writes the result, and by which tests it was found."""
    modules, survivors = summary(finders, chosen, verdicts)
    killed = len(chosen) - len(survivors)
    by_default = sum(module["by default"] for module in modules.values()) / len(chosen)
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    result = {"date": str(datetime.date.today()), "python": platform.python_version()} | versions
    result |= {"seed": options.seed, "stages": options.stages}
    result |= {"mutants": len(chosen), "killed": killed, "share": round(killed / len(chosen), 4)}
    result["share of the README's command"] = round(by_default, 4)
    RESULTS.write_text(json.dumps(result | {"modules": modules, "survivors": survivors}, indent=1) + "\n")
    shares = f"{killed / len(chosen):.1%}, {by_default:.1%} by the README's command"
    print(f"{killed} of {len(chosen)} killed ({shares}); the others are listed in {RESULTS}")


if __name__ == "__main__":
    main()
