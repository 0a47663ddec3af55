"""Mutants: how many of small faults, put into the packages one at a time, do `hatch run quick` and `check` find?

    python -m bench mutants [--count N] [--seed N] [--under FOLDER ...] [--quick] [--whole] [--full] [--output DIR]

A mutant is a comparison or an arithmetic operator exchanged for another one, `and` for `or`, two arguments for each
other, or a statement left out; which ones is drawn. It is given to the quick tests that run its line, and where they do
not find it to all tests of `check` that do, as many as take half a minute together, the shortest first; which they are
is measured once, with `coverage`. Each is tried in a process forked from one that has loaded torch. With --quick no
other tests try it; with --whole those that none finds are given to every case of the same tests, also of those marked
few(n).

found_by: the first test that fails, and does not without the mutant; "time" where they took too long; "" where none
does, "not run by any" where no test runs the line, "too many cases" where --whole took too long.
stage: whose test it is, quick, check or whole.
Ranks that are processes of their own are not measured, so tests that start them count only where they run the line
themselves too.
"""

import ast
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy  # noqa: F401 - what every test needs is loaded before the fork
import pytest
import torch  # noqa: F401
from hypothesis.configuration import set_hypothesis_home_dir

from bench.record import ROOT, asked, parser_of, record

OPERATORS: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "+",
    ast.And: "or",
    ast.Or: "and",
}
LEFT_OUT = ("version.py", "testing.py")
PYTEST = ("-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile")
STAGES = {"quick": "quick and not slow", "check": "not gpu and not mpi"}
"""Of pytest's -m, by what runs these tests, and the name of hypothesis' profile. MPI's ranks are other processes."""
SECONDS = 30.0
"""That the tests of a mutant take together without it; with it they may take `SLOWER` times as long."""
SLOWER = 4
NOT_RUN, MANY, NAMES = "not run by any", "too many cases", "no such test"
FORKING = threading.Lock()
"""Held while a child is made, or it would keep the end of another one's pipe open."""
COLUMNS = ("path", "line", "was", "is", "stage", "found_by", "seconds")


class Mutant(NamedTuple):
    """One change of a file: its bytes from `begin` to `end` become `text`."""

    path: str
    line: int
    begin: int
    end: int
    text: str


class Covered(NamedTuple):
    """tests: names of those that run a line, by file and line. seconds: by name."""

    tests: dict[str, dict[int, set[str]]]
    seconds: dict[str, float]

    def of(self, mutant: Mutant) -> list[str]:
        """Those that run its line, or any of the file where only importing runs that; the shortest, for `SECONDS`."""
        lines, taken, found = self.tests.get(mutant.path, {}), 0.0, []
        names = lines.get(mutant.line) or set[str]().union(*lines.values())
        for name in sorted(names, key=lambda name: (self.seconds.get(name, 0.0), name)):
            taken += self.seconds.get(name, 0.0)
            if taken > SECONDS:
                break
            found.append(name)
        return found


def main(argv: Sequence[str] = ()) -> None:
    """Draws mutants and tries them, as many at a time as there are cores."""
    parser = parser_of("mutants", __doc__, full="300 mutants: an hour")
    parser.add_argument("--count", type=int, help="default 10; full 300")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--under", nargs="+", metavar="FOLDER", default=["packages"])
    parser.add_argument("--whole", action="store_true", help="give survivors to every case of the same tests")
    parser.add_argument("--quick", action="store_true", help="give them to quick tests only")
    options = asked(parser, argv, count=(10, 300))
    everything = [mutant for path in _sources(options.under) for mutant in mutants_of(path, (ROOT / path).read_bytes())]
    drawn = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as pool:
        trees = queue.SimpleQueue[Path]()
        for number in range(cores):
            trees.put(_copied(Path(folder) / str(number)))
        stages = {
            stage: _covered(Path(folder) / "0", stage, options.under) for stage in list(STAGES)[: 2 - options.quick]
        }
        for stage, covered in stages.items():
            some = sorted(covered.seconds, key=covered.seconds.__getitem__)[:: max(1, len(covered.seconds) // 50)]
            assert not (said := _failing(Path(folder) / "0", stage, some)), f"without a mutant, too, there is {said}"
        tried = pool.map(lambda mutant: _tried(trees, mutant, stages, options.whole), drawn)
        against, values = "the same tests without a mutant", ("seconds",)
        rows = record(options, tried, labels=COLUMNS[:2], values=values, against=against, shown=COLUMNS)
    for stage in (*stages, *(["whole"] if options.whole else [])):
        print(f"{sum(row['stage'] == stage for row in rows)} of {len(rows)} found by {stage}", flush=True)
    print(f"{sum(row['found_by'] == NOT_RUN for row in rows)} not run by any test", flush=True)


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """All of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    for node in _code(ast.parse(source)):
        if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp):
            left, op, right = _operands(node)
            if type(op) in OPERATORS:
                begin, end = span(left)[1], span(right)[0]
                between = re.sub(
                    rb"[^\s()#]+(\s+(not|in)\b)?", OPERATORS[type(op)].encode(), source[begin:end], count=1
                )
                yield Mutant(path, node.lineno, begin, end, between.decode())
        elif (
            isinstance(node, ast.Call)
            and len(node.args) > 1
            and ast.unparse(node.func) not in ("min", "max")  # of which the order says nothing
            and not any(isinstance(a, ast.Starred) for a in node.args)
        ):
            (begin, middle), (again, end) = span(node.args[0]), span(node.args[1])
            swapped = source[again:end] + source[middle:again] + source[begin:middle]
            if source[again:end] != source[begin:middle]:
                yield Mutant(path, node.lineno, begin, end, swapped.decode())
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield Mutant(path, node.lineno, *span(node), "pass")


def _operands(node: Any) -> tuple[Any, Any, Any]:
    if isinstance(node, ast.Compare):
        return node.left, node.ops[0], node.comparators[0]
    if isinstance(node, ast.BoolOp):
        return node.values[0], node.op, node.values[1]
    return node.left, node.op, node.right


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes but for annotations and formatted text."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if (
                isinstance(child, ast.AST)
                and not isinstance(child, ast.JoinedStr)
                and name not in ("annotation", "returns")
            ):
                yield child
                yield from _code(child)


def _sources(folders: Sequence[str]) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: S607 - of whoever runs it by hand
    paths = [path for path in listed.split() if path.endswith(".py") and "/src/" in path]
    return [path for path in paths if not path.endswith(LEFT_OUT)]


def _copied(tree: Path) -> Path:
    """The files of the checkout, and compiled kernels."""
    left_out = (".git", ".venv*", "build", "__pycache__", ".*_cache", ".hypothesis", "runs", ".dev")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*left_out))
    return tree


def _environment(tree: Path) -> dict[str, str]:
    sources = [str(folder) for kind in ("packages", "apps") for folder in (tree / kind).glob("*/src")]
    return {"PYTHONPATH": os.pathsep.join([str(tree), *sources]), "OMP_NUM_THREADS": "1"}


def _covered(tree: Path, stage: str, under: Sequence[str]) -> Covered:
    """Runs the tests of a stage once, and watches the files under these folders."""
    from coverage import CoverageData

    command = [sys.executable, "-m", "pytest", *PYTEST, stage, "-m", STAGES[stage], "--cov-context", "test"]
    command += [f"--cov={folder}" for folder in under]
    command += ["--cov-report", "", "--durations", "0", "--durations-min", "0"]
    command += ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "-rfE"]
    done = subprocess.run(command, cwd=tree, env=os.environ | _environment(tree), capture_output=True, text=True)
    left_out = set(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE))
    assert done.returncode == bool(left_out), f"the tests do not run:\n{done.stdout[-2000:]}"
    print(*(f"left out, since it fails as it is: {name}" for name in sorted(left_out)), sep="\n", flush=True)
    seconds: dict[str, float] = {}
    for taken, name in re.findall(r"^([\d.]+)s \w+ +(\S.*)$", done.stdout, re.MULTILINE):
        seconds[name] = seconds.get(name, 0.0) + float(taken)
    data = CoverageData(str(tree / ".coverage"))
    data.read()
    found = dict[str, dict[int, set[str]]]()
    for path in data.measured_files():
        lines = data.contexts_by_lineno(path).items()
        by_line = {
            line: {context.rpartition("|")[0] for context in contexts} - {"", *left_out} for line, contexts in lines
        }
        found[str(Path(path).relative_to(tree))] = by_line
    return Covered(found, seconds)


def _tried(trees: "queue.SimpleQueue[Path]", mutant: Mutant, stages: dict[str, Covered], whole: bool) -> dict[str, Any]:
    tree = trees.get()
    path, began = tree / mutant.path, time.monotonic()
    source, times = path.read_bytes(), path.stat()
    tests = {stage: covered.of(mutant) for stage, covered in stages.items()}
    stage, found = "", ""
    try:
        for stage in (*tests, *(["whole"] if whole else [])):
            path.write_bytes(source[: mutant.begin] + mutant.text.encode() + source[mutant.end :])
            try:
                found = _found_by(tree, stage, tests.get(stage) or _functions(list(tests.values())[-1]))
            finally:
                path.write_bytes(source)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            if "::" in found and _failing(tree, stage, [found]):
                found = ""  # it fails without the mutant too
            if found not in ("", NOT_RUN, MANY):
                break
        else:
            stage = ""
    finally:
        trees.put(tree)
    was = " ".join(source[mutant.begin : mutant.end].decode().split())
    row = {"path": mutant.path, "line": mutant.line, "was": was, "is": " ".join(mutant.text.split())}
    return row | {"stage": stage, "found_by": found, "seconds": time.monotonic() - began}


def _found_by(tree: Path, stage: str, tests: list[str]) -> str:
    found = _failing(tree, stage, tests) if tests else NOT_RUN
    if found == NAMES:  # of the cases, which the mutant has changed
        found = _failing(tree, stage, _functions(tests))
    return MANY if stage == "whole" and found == "time" else found


def _functions(tests: list[str]) -> list[str]:
    return list(dict.fromkeys(name.partition("[")[0] for name in tests))


def _failing(tree: Path, stage: str, tests: list[str]) -> str:
    """The first test that fails, "" where all pass."""
    context = get_context("fork")
    with FORKING:
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_judge, args=(there, tree, stage, tests))
        child.start()
        there.close()
    try:
        return str(here.recv()) if here.poll(SLOWER * SECONDS) else "time"
    except EOFError:
        return "it ended the process"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.kill()
        child.join()


class _First:
    """Of pytest's plugins: keeps the first test that fails."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid or "importing"


def _judge(answer: Any, tree: Path, stage: str, tests: list[str]) -> None:
    """In a process of its own: runs the tests until one fails."""
    os.setpgid(0, 0)
    os.environ.update(_environment(tree) | {"PYTHONDONTWRITEBYTECODE": "1"})
    os.chdir(tree)
    sys.dont_write_bytecode = True
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    for name, module in list(sys.modules.items()):  # of the tree as it is, which benchmarks have imported
        if (getattr(module, "__file__", None) or "").startswith((str(ROOT / "packages"), str(ROOT / "apps"))):
            del sys.modules[name]
    set_hypothesis_home_dir(tree / ".hypothesis")
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    first = _First()
    cases = ["--whole"] if stage == "whole" else []
    code = pytest.main(["-x", "--assert=plain", *PYTEST, stage, *cases, *tests], plugins=[first])
    unknown = code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
    answer.send(first.failed or (NAMES if unknown else f"exit {code}" if code else ""))
