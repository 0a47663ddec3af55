"""A changelog is made of fragments in the folder `changes` of the package that changed; see CONTRIBUTING.md."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from release.packages import ROOT, packages

PACKAGES = packages()
NAME = re.compile(r"(\d+|\+[a-z0-9-]+)\.(added|changed|fixed|removed)\.md")
FRAGMENTS = [(name, file) for name, package in PACKAGES.items() for file in sorted(package.folder.glob("changes/*"))]


def complaint(name, text):
    """What is wrong with a fragment; None if nothing is."""
    if not NAME.fullmatch(name):
        return f"{name}: expected +WORDS.KIND.md, of small letters, KIND one of added, changed, fixed, removed"
    if not re.match(r"[A-Z`\d]", text) or not text.endswith(".\n") or "\n\n" in text or text.startswith(("#", "-")):
        return f"{name}: expected one paragraph of whole sentences, without a heading or a bullet: {text!r}"
    return None


def test_fragments_are_well_formed():
    wrong = [complaint(file.name, file.read_text()) for _, file in FRAGMENTS]
    assert not [each for each in wrong if each], wrong


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("first.md", "A new thing.\n"),
        ("+first.add.md", "A new thing.\n"),
        ("+First.added.md", "A new thing.\n"),
        ("+first.added.md", "- A new thing.\n"),
        ("+first.added.md", "A new thing\n"),
        ("+first.added.md", ""),
        ("+first.added.md", "A thing.\n\nAnother one.\n"),
    ],
)
def test_a_malformed_fragment_is_seen(name, text):
    assert complaint(name, text)
    assert complaint("+first.added.md", "`A` new thing.\n") is None


@pytest.mark.parametrize("name", PACKAGES)
def test_the_next_changelog_has_every_fragment(name):
    folder = PACKAGES[name].folder
    words = ["build", "--draft", "--config", ROOT / "towncrier.toml", "--dir", folder, "--name", name]
    command = [sys.executable, "-m", "towncrier", *words, "--version", "1.2.3", "--date", "2026-01-01"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "## 1.2.3 (2026-01-01)" in done.stdout
    said = " ".join(done.stdout.split())
    for owner, file in FRAGMENTS:
        assert owner != name or " ".join(file.read_text().split()) in said
    assert "<!-- releases -->" in (folder / "CHANGELOG.md").read_text()
