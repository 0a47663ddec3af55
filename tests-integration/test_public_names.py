"""Every public name says what it is, in a form that tools read (Google's), and stands in an example."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import TypedDict, Unpack, is_typeddict

import pytest

from release.packages import ROOT

pytestmark = pytest.mark.quick

MODULES = sorted(path.parent.name for path in ROOT.glob("packages/*/src/*/__init__.py"))
SECTION = re.compile(r"^(Args|Attributes|Raises):\n((?:    .*\n?|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\*{0,2}\w+): \S", re.MULTILINE)


def public(module):
    """Names of a package with what they stand for, values such as numbers left out."""
    package = importlib.import_module(module)
    found = {name: getattr(package, name) for name in package.__all__}
    return {name: each for name, each in found.items() if inspect.isclass(each) or inspect.isfunction(each)}


def members(each):
    """A class's own public methods and properties, as functions; not those that a base class describes."""
    for name, member in vars(each).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function) and (member.__doc__ or not inspect.getdoc(member)):
            yield name, inspect.unwrap(function)


def described(module):
    """(name, what it stands for) of all that needs a docstring: functions, classes, and their methods."""
    for name, each in public(module).items():
        yield name, each
        if inspect.isclass(each):
            yield from ((f"{name}.{member}", function) for member, function in members(each))


def entries(text, *sections):
    """What the sections of a docstring name."""
    return {
        entry for section, body in SECTION.findall(text + "\n") if section in sections for entry in ENTRY.findall(body)
    }


def made_by(each):
    """The function itself, or what makes a class: the nearest constructor, which it may inherit; None without one."""
    if inspect.isfunction(each):
        return each
    made = (
        getattr(base, name) for base in inspect.getmro(each) for name in ("__init__", "__new__") if name in vars(base)
    )
    return next(filter(inspect.isfunction, made), None)


def keywords(function):
    """What a caller may give by name only, and all that it may give."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}, {p.name for p in parameters}


def unpacked(each):
    """The TypedDict whose keys a function, or a class, takes as keywords; None without one."""
    function = made_by(each)
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.VAR_KEYWORD and (said := re.fullmatch(r".*Unpack\[([\w.]+)\]", str(p.annotation))):
            return getattr(importlib.import_module(function.__module__), said[1].rpartition(".")[2])
    return None


def keys_described(settings):
    """Keys that a TypedDict's docstring describes, or that of a public class which it names."""
    package, own = importlib.import_module(settings.__module__.partition(".")[0]), settings.__doc__ or ""
    named = [getattr(package, word, None) for word in re.findall(r"`(\w+)`", own)]
    texts = [own, *(each.__doc__ or "" for each in named if inspect.isclass(each))]
    return set().union(*(entries(inspect.cleandoc(text), "Args", "Attributes") for text in texts))


def faults(name, each):
    """What a docstring's reader would miss."""
    text = inspect.cleandoc(each.__doc__ or "")
    told = {entry.lstrip("*") for entry in entries(text, "Args")}
    takes = inspect.isfunction(each) or ({"__init__", "__new__"} & vars(each).keys() and not is_typeddict(each))
    function = made_by(each)
    required, known = keywords(function) if function and (takes or told) else (set(), set())
    if text.startswith("See `"):
        return  # where it is described
    settings = each if inspect.isclass(each) and is_typeddict(each) else unpacked(each) if takes else None
    if settings is not None and (missing := set(settings.__annotations__) - keys_described(settings)):
        yield f"{name}: {settings.__name__} does not say what {sorted(missing)} are"
    if missing := required - told - entries(text, "Attributes"):
        yield f"{name}: Args does not say what {sorted(missing)} are"
    if told - known:
        yield f"{name}: Args tells of {sorted(told - known)}, which it does not take"
    for prose in re.findall(r"\b[Rr]aises [A-Z]\w*(?:Error|Lost)\b", SECTION.sub("", text + "\n")):
        yield f"{name}: {prose!r} belongs into a section Raises"
    for line in re.findall(r"^(\w+(?:, \w+)*): ", SECTION.sub("", text + "\n"), re.MULTILINE):
        if set(line.split(", ")) & known:
            yield f"{name}: {line!r} belongs into a section Args"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_says_what_it_is(module):
    silent = {name for name, each in described(module) if not (each.__doc__ or "").strip()}
    assert not silent, sorted(silent)


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_are_what_tools_read(module):
    wrong = [fault for name, each in described(module) for fault in faults(name, each)]
    assert not wrong, "\n".join(wrong)


def test_a_docstring_in_another_form_is_seen():
    def one(a, *, b):
        """Does it.

        b: how much.  Raises ValueError for less.
        """

    assert len(list(faults("one", one))) == 3

    def other(a, *, b):
        """Does it.

        Args:
            b: How much.
            c: What there is not.

        Raises:
            ValueError: Less.
        """

    assert list(faults("other", other)) == ["other: Args tells of ['c'], which it does not take"]


class Known(TypedDict, total=False):
    """Settings.

    Attributes:
        a: One.
    """

    a: int
    b: int


def test_keys_of_an_unpacked_typed_dict_are_keywords_that_are_described():
    def one(**settings: Unpack[Known]):
        """Does it.

        Args:
            settings: Keywords of `Known`.
        """

    assert list(faults("one", one)) == ["one: Known does not say what ['b'] are"]
    assert list(faults("Known", Known)) == ["Known: Known does not say what ['b'] are"]


def examples():
    """All Python that the tree shows to users, and that tests run."""
    pages = [ROOT / "README.md"]
    pages += [page for each in ("packages/*/README.md", "apps/*/README.md", "docs/**/*.md") for page in ROOT.glob(each)]
    blocks = [re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in pages]
    files = [file.read_text() for file in ROOT.glob("examples/**/*.py")]
    return "\n".join([*(block for each in blocks for block in each), *files])


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_an_example(module):
    words = set(re.findall(r"\w+", examples()))
    missing = set(importlib.import_module(module).__all__) - words - {"__version__"}
    assert not missing, sorted(missing)
