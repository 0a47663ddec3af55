"""How `python -m release.tag` makes a release: changelogs, bounds of siblings, a commit, tags."""

from __future__ import annotations

import shutil
import subprocess
import tomllib

import pytest

from release.environment import ReleaseError
from release.packages import ROOT, packages
from release.tag import last_version, tag, with_fragments

NAMES = ("thinwire-communicators", "sparse-compress", "sparse-collectives")


@pytest.fixture
def tree(tmp_path):
    """(folder, git): three packages as they stand here, committed, without tags."""
    root = tmp_path / "tree"
    root.mkdir()
    for name in NAMES:
        package = packages()[name].folder
        folder = root / package.relative_to(ROOT)
        shutil.copytree(package, folder, ignore=shutil.ignore_patterns("src", "tests", "changes"))
        (folder / "changes").mkdir()
        (folder / "changes" / "+first.added.md").write_text("All of it.\n")
    shutil.copy(ROOT / "towncrier.toml", root)

    def git(*words):
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)

    git("init", "--quiet")
    for setting in ("user.name a", "user.email a@example.org", "commit.gpgsign false", "tag.gpgsign false"):
        git("config", *setting.split())
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    return root, git


def required(root, name):
    project = tomllib.loads((packages(root)[name].folder / "pyproject.toml").read_text())["project"]
    return {*project["dependencies"], *project.get("optional-dependencies", {}).get("testing", ())}


def test_a_release_binds_siblings_to_what_it_was_tested_with(tree):
    root, git = tree
    assert tag("0.1.0", NAMES, root) == [f"{name}-v0.1.0" for name in sorted(NAMES)]
    assert not with_fragments(packages(root))
    changed = packages(root)["sparse-collectives"].folder
    (changed / "changes").mkdir(exist_ok=True)
    (changed / "changes" / "+other.fixed.md").write_text("Another thing.\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "a change")
    before = required(root, "sparse-collectives")
    assert {
        "sparse-compress>=0.1.0",
        "thinwire-communicators>=0.1.0",
        "thinwire-communicators[testing]>=0.1.0",
    } < before
    assert tag("0.2.0", with_fragments(packages(root)), root) == ["sparse-collectives-v0.2.0"]
    assert required(root, "sparse-collectives") == before
    pages = (changed / "CHANGELOG.md").read_text()
    assert pages.index("## 0.2.0") < pages.index("Another thing.") < pages.index("## 0.1.0") < pages.index("All of it.")
    tag("0.3.0", ["sparse-compress", "sparse-collectives"], root)  # also without a fragment
    assert {"sparse-compress>=0.3.0", "thinwire-communicators>=0.1.0"} < required(root, "sparse-collectives")
    assert [last_version(name, root) for name in NAMES] == ["0.1.0", "0.3.0", "0.3.0"]


def test_what_cannot_be_released_is_refused_before_anything_is_changed(tree):
    root, git = tree
    with pytest.raises(ReleaseError, match=r"release them too, .*: sparse-compress, thinwire-communicators"):
        tag("0.1.0", ["sparse-collectives"], root)
    with pytest.raises(ReleaseError, match=r"other is to be released; this tree's are .*sparse-compress"):
        tag("0.1.0", ["other"], root)
    with pytest.raises(ReleaseError, match="no package is to be released"):
        tag("0.1.0", [], root)
    git("tag", "sparse-compress-v0.2.0")
    with pytest.raises(ReleaseError, match=r"0\.2\.0 does not come after sparse-compress 0\.2\.0"):
        tag("0.2.0", NAMES, root)
    git("diff", "--exit-code", "HEAD")
    tag("0.3.0", NAMES, root)
    (packages(root)["sparse-compress"].folder / "src").mkdir()
    (packages(root)["sparse-compress"].folder / "src" / "new.py").write_text("")
    git("add", ".")
    git("commit", "--quiet", "--message", "what another package may use")
    with pytest.raises(ReleaseError, match=r"release them too, .*: sparse-compress$"):
        tag("0.4.0", ["sparse-collectives"], root)
    (root / "towncrier.toml").write_text("")
    with pytest.raises(ReleaseError, match=r"here is more:\n M towncrier.toml"):
        tag("0.1.0", NAMES, root)
