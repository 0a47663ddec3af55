"""Mutants: how many of small faults, put into the packages one at a time, does `hatch run quick` find?

    python -m bench mutants [--count N] [--seed N] [--under FOLDER ...] [--whole] [--full] [--output DIR]

A mutant is a comparison or an arithmetic operator exchanged for another one, `and` for `or`, two arguments for each
other, or a statement left out; which ones is drawn. found_by: the first test that fails; "time" where they took too
long; "" where none does. With --whole a mutant that the quick tests do not find is given to all tests, which takes as
long as the check for each.
"""

import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
QUICK = ("-m", "quick", "--hypothesis-profile", "quick", "--dist", "worksteal")
WHOLE = ("-m", "not gpu", "--dist", "loadfile")
SECONDS = {QUICK: 300, WHOLE: 7200}
COLUMNS = ("path", "line", "was", "is", "found_by", "seconds")


class Mutant(NamedTuple):
    """One change of a file: its bytes from `begin` to `end` become `text`."""

    path: str
    line: int
    begin: int
    end: int
    text: str


def main(argv: Sequence[str] = ()) -> None:
    """Draws mutants and tries them, one after the other."""
    parser = parser_of("mutants", __doc__, full="300 mutants: hours")
    parser.add_argument("--count", type=int, help="default 10; full 300")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--under", nargs="+", metavar="FOLDER", default=["packages"])
    parser.add_argument("--whole", action="store_true", help="give survivors to all tests")
    options = asked(parser, argv, count=(10, 300))
    everything = [mutant for path in _sources(options.under) for mutant in mutants_of(path, (ROOT / path).read_bytes())]
    drawn = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
    with tempfile.TemporaryDirectory() as folder:
        tree = _copied(Path(folder))
        assert not _failing(tree, QUICK), "the tests fail as they are"
        rows = []
        for mutant in drawn:
            rows.append(_tried(tree, mutant, whole=options.whole))
            print(*(f"{rows[-1][name]}" for name in COLUMNS), sep="  ", flush=True)
    found = sum(bool(row["found_by"]) for row in rows)
    print(f"{found} of {len(rows)} found", flush=True)
    record(options, rows, labels=COLUMNS[:2], values=("seconds",), against="the same tests without a mutant")


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
            isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args)
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


def _copied(folder: Path) -> Path:
    """The files that git knows, and compiled kernels."""
    tree = folder / "tree"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".*_cache", "runs")
    )
    return tree


def _tried(tree: Path, mutant: Mutant, *, whole: bool) -> dict[str, Any]:
    path, began = tree / mutant.path, time.monotonic()
    source = path.read_bytes()
    path.write_bytes(source[: mutant.begin] + mutant.text.encode() + source[mutant.end :])
    try:
        found = _failing(tree, QUICK) or (_failing(tree, WHOLE) if whole else "")
    finally:
        path.write_bytes(source)
    was = " ".join(source[mutant.begin : mutant.end].decode().split())
    row = {"path": mutant.path, "line": mutant.line, "was": was, "is": " ".join(mutant.text.split())}
    return row | {"found_by": found, "seconds": time.monotonic() - began}


def _failing(tree: Path, which: tuple[str, ...]) -> str:
    """The first test that fails, "" where all pass."""
    sources = [str(folder) for kind in ("packages", "apps") for folder in (tree / kind).glob("*/src")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), *sources]), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider", *which]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=SECONDS[which])
    except subprocess.TimeoutExpired:
        return "time"
    if not done.returncode:
        return ""
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return first[1] if first else f"exit {done.returncode}"
