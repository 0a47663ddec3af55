"""What each wheel and sdist must hold, read from the built file."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

from release.packages import ROOT, Package, name_of, packages

HOME = "https://github.com/thinwire-project/thinwire"
"""Where the tree is published; each pyproject.toml says so once more, as its files cannot share a line."""

LINK = re.compile(r"(?<![\w\])])\[[^\[\]]+\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def faults(package: Package, archive: Path) -> Iterator[str]:
    """What is wrong with a wheel or an sdist, a line each."""
    files = contents(archive)
    wheel = archive.suffix == ".whl"
    if wheel:
        yield from _foreign(package, files)
        [described] = (name for name in files if name.endswith(".dist-info/METADATA"))
    else:
        described = "PKG-INFO"
        yield from (f"holds {name}, which is made by a build" for name in files if name.endswith((".so", ".part")))
    licences = [name for name in files if PurePosixPath(name).name == "LICENSE"]
    if [files[name] for name in licences] != [(ROOT / "LICENSE").read_bytes()]:
        yield f"holds {licences or 'no LICENSE'}, not one that is the tree's"
    if not any(name.endswith(f"{package.module}/py.typed") for name in files):
        yield "holds no py.typed"
    yield from _undescribed(package, Parser().parsestr(files[described].decode()))


def contents(archive: Path) -> dict[str, bytes]:
    """Files of an archive by name; an sdist's without the folder that it puts everything into.

    Raises:
        ValueError: An sdist holds something that is no plain file.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    files = {}
    with tarfile.open(archive) as sdist:
        for member in sdist:
            file = sdist.extractfile(member) if member.isfile() else None
            if file is None:
                raise ValueError(f"{archive.name} holds {member.name}, which is no plain file: unpacking it may fail")
            files[member.name.partition("/")[2]] = file.read()
    return files


def links(page: str) -> list[str]:
    """Where the links of a Markdown page lead; what stands in code is none."""
    return LINK.findall(CODE.sub("", page))


def broken_links(page: str, here: str) -> Iterator[str]:
    """Links that lead nowhere from a package index: relative ones, and to files that the tree does not hold.

    Args:
        page: In Markdown.
        here: Where the tree is found as of this release; links to it are looked up in the tree that is here.
    """
    for link in links(page):
        if not re.match(r"https?://|mailto:", link):
            yield f"its page links to {link}, which is relative"
        elif link.startswith(HOME):
            path = link.removeprefix(here).partition("#")[0]
            if path == link or not (ROOT / path).exists():
                yield f"its page links to {link}, which is not in the tree as of this release"


def _foreign(package: Package, files: dict[str, bytes]) -> Iterator[str]:
    """Names that a wheel would put beside its own package."""
    tops = {name.partition("/")[0] for name in files}
    for top in sorted(tops - {package.module} - package.commands):
        if not top.endswith(".dist-info"):
            yield f"installs {top} beside {package.module}"


def _undescribed(package: Package, metadata: Message) -> Iterator[str]:
    """What a package index would not know, or show wrongly."""
    for field in ("Author", "Keywords", "License-Expression", "License-File", "Requires-Python", "Summary", "Version"):
        if not metadata[field]:
            yield f"says no {field}"
    classifiers = metadata.get_all("Classifier", [])
    for begin in ("Development Status", "Intended Audience", "Programming Language :: Python :: 3.11", "Typing"):
        if not any(classifier.startswith(begin) for classifier in classifiers):
            yield f"has no classifier {begin}"
    for line in metadata.get_all("Requires-Dist", []):
        if name_of(line) in packages() and ">=" not in line and ".dev" not in metadata["Version"]:
            yield f"takes any {line}, of which it was tested with one"
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    for name in ("Homepage", "Documentation", "Changelog", "Issues"):
        if not urls.get(name, "").startswith(HOME):
            yield f"says no {name} at {HOME}"
    page = str(metadata.get_payload())
    if path := re.search(r"\./(?:packages|apps)/\S*", page):
        yield f"its page names {path[0]}, which is not on an index"
    yield from broken_links(page, f"{HOME}/blob/{package.name}-v{metadata['Version']}/")
