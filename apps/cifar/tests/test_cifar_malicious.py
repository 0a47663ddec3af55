"""A pickle is a program: of one that somebody has made, nothing runs but the making of arrays, lists and numbers."""

import io
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_files import drawn, published_python_content
from thinwire_cifar.data import cifar_python
from thinwire_trainer.errors import RunError

WHOLE = published_python_content(*drawn(0, 2))
BLACK = np.zeros((1, 3072), "u1")
BEFORE_END = WHOLE[:-1]  # whatever follows runs after the data set has been made


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *given: Any) -> None:
        self.call = (function, given)

    def __reduce__(self) -> Any:
        return self.call


def read(content: bytes) -> None:
    cifar_python.read(Path("batch"), content, key="labels", classes=10)


def touch(target: Path, function: str = "posix\nsystem") -> bytes:
    return f"c{function}\n(S'touch {target}'\ntR".encode()


MALICIOUS = {
    "os.system": lambda target: touch(target) + b".",
    "eval": lambda target: f'c__builtin__\neval\n(S\'__import__("os").mkdir("{target}")\'\ntR.'.encode(),
    "subprocess": lambda target: pickle.dumps(Calls(subprocess.run, ["touch", str(target)])),
    "exec": lambda target: pickle.dumps({"data": Calls(exec, f"import os; os.mkdir({str(target)!r})"), "labels": []}),
    "in a label": lambda target: pickle.dumps(
        {"labels": [Calls(os.mkdir, str(target))], "data": np.zeros((1, 3072), "u1")}
    ),
    "after the data": lambda target: b"\x80\2" + BEFORE_END[2:] + touch(target) + b"0.",
    "an object array": lambda target: pickle.dumps({"data": np.array([Calls(os.mkdir, str(target))]), "labels": [1]}),
    "inst": lambda target: f"(S'touch {target}'\niposix\nsystem\n.".encode(),
    "a dotted name": lambda target: b"\x80\4\x8c\5numpy\x8c\x0d__import__.os\x93.",
    "numpy's own loader": lambda target: b"cnumpy\nload\n(S'x'\ntR.",
    "getattr": lambda target: b"c__builtin__\ngetattr\n(cnumpy\ndtype\nS'__class__'\ntR.",
    "a codec": lambda target: b"c_codecs\nencode\n(S'x'\nS'rot13'\ntR.",
    "a persistent name": lambda target: b"Pwhatever\n.",
    "an extension": lambda target: b"\x80\2\x82\1.",
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_nothing_foreign_runs(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(RunError, match=r"^batch is damaged or not of the Python version of CIFAR: "):
        read(MALICIOUS[kind](target))
    assert not target.exists()


def test_the_programs_would_run_elsewhere(tmp_path: Path) -> None:
    """So the test above shows something."""
    for kind in ("os.system", "eval", "subprocess", "exec", "in a label", "after the data", "inst"):
        target = tmp_path / kind.replace(" ", "-")
        pickle.loads(MALICIOUS[kind](target), encoding="bytes")
        assert target.exists(), kind


def test_what_was_asked_for_is_named() -> None:
    with pytest.raises(RunError, match=r"it asks for posix\.system, which was not run"):
        read(touch(Path("made")) + b".")


SEALED = {
    "a class's state": b"cnumpy\nndarray\n}S'x'\nK\1sb.",
    "a slot": b"cnumpy\ndtype\n(N}S'__init__'\nK\1stb.",
    "_codecs.encode": b"c_codecs\nencode\n}S'x'\nK\1sb.",
    "a made type": b"cnumpy\ndtype\n(S'O8'\ntR.",
    "a list's state": b"]}S'x'\nK\1sb.",
}


@pytest.mark.parametrize("kind", SEALED)
def test_the_stand_ins_cannot_be_changed(kind: str) -> None:
    with pytest.raises(RunError):
        read(SEALED[kind])
    read(WHOLE)


def test_a_few_bytes_take_no_memory() -> None:
    """A place in the memo, a length or a shape may be any number; the unpickler in C reserves room for it."""
    for content in (
        b"\x80\2]r\xff\xff\xff\x7f.",
        b"\x80\4\x8e" + b"\xff" * 7 + b"\x7f" + b"x.",
        b"\x80\4\x95" + b"\xff" * 7 + b"\x7f" + b"x.",
        b"\x80\2\x8b\xff\xff\xff\x7fx.",
        WHOLE.replace(b"M\2\0M\0\x0c\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"),
    ):
        with pytest.raises(RunError):
            read(content)


def nested(levels: int) -> bytes:
    """A tuple of the one before twice, and so on: showing it takes 2 ** levels steps."""
    return b"(t" + b"".join(b"p%d\ng%d\n\x86" % (n, n) for n in range(levels))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content",
    [
        b"\x80\2cnumpy\ndtype\n" + nested(60) + b"\x85R.",
        b"\x80\2" + nested(60) + b".",
        b"\x80\2}X\4\0\0\0data" + nested(60) + b"s.",
        b"\x80\2cnumpy\nndarray\n)R(K\1" + nested(60) + b"NK\0X\0\0\0\0tb.",
    ],
    ids=["type", "alone", "data", "shape"],
)
def test_tuples_in_tuples_take_no_time(content: bytes) -> None:
    with pytest.raises(RunError):
        read(content)


@given(st.binary(max_size=60), st.integers(0, 160))
def test_random_programs(tail: bytes, at: int) -> None:
    content = WHOLE[:at] + tail + WHOLE[at + len(tail) :]
    with suppress(RunError):
        read(content)


def test_no_module_is_imported() -> None:
    asked = [name for name in ("this", "antigravity", "turtledemo") if name not in sys.modules]
    for name in asked:
        with pytest.raises(RunError, match="which was not run"):
            read(f"c{name}\nx\n.".encode())
    assert not set(asked) & set(sys.modules)
    assert isinstance(cifar_python._Unpickler(io.BytesIO(b"N.")), pickle._Unpickler)
