"""What mkdocs does besides, when it builds the site: records, links into the tree, public names that say nothing.

Warnings of these hooks fail a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

log = logging.getLogger("mkdocs.hooks.website")
ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<![\w\])])(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\])\(([^)\s]+)\)")
CODE = re.compile(r"^( *```.*?^ *```)", re.MULTILINE | re.DOTALL)
RECORDS = "bench/results"


def on_files(files: Any, config: Any) -> None:
    """Benchmarks' records are part of the site, so that who has only that can follow a figure to what was measured."""
    for path in sorted((ROOT / RECORDS).glob("*.*")):
        if path.suffix in (".csv", ".json"):
            files.append(File.generated(config, f"{RECORDS}/{path.name}", abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links that leave docs/, as they are good for in a checkout, become links to records, or to the published tree."""
    here = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def linked(match: re.Match[str]) -> str:
        text, link = match.groups()
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(here, path))
        if not path or re.match(r"[a-z]+:", path) or target.startswith("docs/"):
            return match[0]
        if files.get_file_from_path(target):
            return f"{text}({posixpath.relpath(target, posixpath.dirname(page.file.src_uri))})"
        if target.startswith("..") or not (ROOT / target).exists():
            log.warning("%s links to %s, which is not in the tree", page.file.src_uri, link)
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{text}({config.repo_url}/{kind}/main/{target}{'#' + anchor if anchor else ''})"

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(linked, part) for part in parts[::2]]
    return "".join(parts)


def on_pre_build(config: Any) -> None:
    """Every public name of the packages has a docstring."""
    del config
    packages = sorted(path.parent for path in ROOT.glob("packages/*/src/*/__init__.py"))
    loader = griffe.GriffeLoader(search_paths=[package.parent for package in packages])
    for package in packages:
        loader.load(package.name)
    loader.resolve_aliases(external=False)
    for package in packages:
        for path in silent(loader.modules_collection[package.name]):
            log.warning("%s is public and has no docstring", path)


def silent(package: Any) -> list[str]:
    """What a package exports, but its version, and public members of it, that say nothing."""
    found = []
    for name in sorted({str(each) for each in package.exports or ()} - {"__version__"}):
        each = package.members[name]
        each = each.final_target if each.is_alias else each
        members = each.members.values() if each.is_class else ()
        methods = [m for m in members if not m.name.startswith("_") and not m.is_alias and (m.is_function or told(m))]
        found += [e.path for e in (each, *methods) if not (said(e) or any(said(base) for base in overridden(each, e)))]
    return found


def said(what: Any) -> bool:
    """Whether it has a docstring."""
    return bool(what.docstring and what.docstring.value.strip())


def overridden(owner: Any, member: Any) -> list[Any]:
    """Members of the bases that it overrides, whose docstrings it inherits."""
    return [base.members[member.name] for base in owner.mro() if member.name in base.members] if owner.is_class else []


def told(member: Any) -> bool:
    """Whether it is a property, which needs a docstring of its own; attributes stand in their class's."""
    return member.is_attribute and "property" in member.labels
