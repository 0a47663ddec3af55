"""What would be published: every wheel and sdist, as it is built; `hatch run release-check` installs and uses them."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import subprocess
import sys

import pytest
from imported_modules import imported

from release.archives import HOME, broken_links, contents, faults
from release.environment import linked
from release.packages import ROOT, Package, build, name_of, packages, wheel_of

PACKAGES = packages()
MODULE_OF = {"opentelemetry-sdk": "opentelemetry", "pillow": "PIL", "scikit-learn": "sklearn"}
"""Modules whose name is not their distribution's own."""
COMES_WITH_TORCH = {"triton"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Archives by package; what compiles is left out, which takes long and has tests of its own."""
    into = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPARSE_COMPRESS_NATIVE", "0")
        return {name: build(package, into) for name, package in PACKAGES.items()}


@pytest.mark.few(0)
@pytest.mark.parametrize("name", PACKAGES)
def test_archives_hold_what_an_index_shows(name, built):
    found = {archive.name: list(faults(PACKAGES[name], archive)) for archive in built[name]}
    assert len(found) == 2
    assert not any(found.values()), found


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_says_its_version(name):
    module = importlib.import_module(PACKAGES[name].module)
    assert module.__version__ == importlib.metadata.version(name)


@pytest.mark.few(7)
@pytest.mark.parametrize("name", PACKAGES)
def test_every_import_is_declared(name):
    """Also those in functions, which a first example may not reach."""
    package = PACKAGES[name]
    distributions = package.requires | {name_of(line) for lines in package.extras.values() for line in lines}
    siblings = {each: PACKAGES[each].module for each in distributions & set(PACKAGES)}
    declared = {MODULE_OF.get(each, siblings.get(each, each.replace("-", "_"))) for each in distributions}
    known = declared | COMES_WITH_TORCH | {package.module} | set(sys.stdlib_module_names)
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in sorted(package.folder.glob("src/**/*.py"))
        for module in imported(file)
        if module not in known
    ]
    assert not wrong, wrong


@pytest.fixture
def clone(tmp_path):
    """git(*words) in a repository of one small package's files, committed once, without tags."""
    folder = tmp_path / "tree"
    shutil.copytree(PACKAGES["local-sgd"].folder, folder / "packages" / "local-sgd")

    def git(*words):
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    return git, folder


def version_of(folder, into):
    wheel = wheel_of(build(Package(folder / "packages" / "local-sgd"), into))
    return wheel.name.split("-")[1]


def test_the_version_is_that_of_the_packages_own_tag(clone, tmp_path):
    git, folder = clone
    git("tag", "sparse-compress-v9.0.0")
    assert version_of(folder, tmp_path / "without").startswith("9999.dev")
    git("tag", "local-sgd-v1.2.3")
    assert version_of(folder, tmp_path / "tagged") == "1.2.3"
    git("commit", "--quiet", "--allow-empty", "--message", "more")
    assert version_of(folder, tmp_path / "after").startswith("1.2.4.dev1+g")


def test_files_without_git_have_a_version_too(clone, tmp_path):
    _, folder = clone
    shutil.rmtree(folder / ".git")
    assert version_of(folder, tmp_path / "dist") == "9999.dev0"


def test_a_links_place_in_an_archive_is_refused(tmp_path):
    """As hatchling would put one there for a licence that is a link to the tree's."""
    import tarfile

    (tmp_path / "LICENSE").symlink_to("../../LICENSE")
    with tarfile.open(tmp_path / "a-1.tar.gz", "w:gz") as sdist:
        sdist.add(tmp_path / "LICENSE", "a-1/LICENSE")
    with pytest.raises(ValueError, match="a-1/LICENSE, which is no plain file"):
        contents(tmp_path / "a-1.tar.gz")


@pytest.mark.parametrize(
    ("link", "wrong"),
    [
        ("../../CONTRIBUTING.md", "is relative"),
        ("#speed", "is relative"),
        (f"{HOME}/blob/local-sgd-v1/packages/local-sgd/../../gone.md", "not in the tree"),
        (f"{HOME}/blob/local-sgd-v0/CONTRIBUTING.md", "not in the tree as of this release"),
        (f"{HOME}/blob/local-sgd-v1/packages/local-sgd/../../CONTRIBUTING.md#rules", None),
        ("https://example.org", None),
    ],
)
def test_links_that_an_index_would_break_are_seen(link, wrong):
    page = f"As [here]({link}) says:\n```python\nmodels[0](inputs)\nf([x](y))\n```\n"
    found = list(broken_links(page, f"{HOME}/blob/local-sgd-v1/"))
    assert len(found) == (wrong is not None)
    assert wrong is None or wrong in found[0]


def test_a_folder_of_several_distributions_is_linked_with_those_of_extras(tmp_path, monkeypatch):
    """As NVIDIA's, of which torch asks for some as extras of another."""
    needs = {"uses": ["all-parts[one]"], "all-parts": ['one-part; extra == "one"', 'none; extra == "two"', "base"]}
    for name in ("uses", "all-parts", "one-part", "base"):
        info = tmp_path / "installed" / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir(parents=True)
        lines = [f"Name: {name}", "Version: 1", *(f"Requires-Dist: {need}" for need in needs.get(name, []))]
        (info / "METADATA").write_text("\n".join(lines))
        (info / "RECORD").write_text(f"shared/{name}.py,,\n{info.name}/METADATA,,\n../../bin/{name},,\n")
        (tmp_path / "installed" / "shared").mkdir(exist_ok=True)
        (tmp_path / "installed" / "shared" / f"{name}.py").touch()  # Python 3.12 passes over files that are missing
    monkeypatch.syspath_prepend(tmp_path / "installed")
    found = {link.name for link in linked(tmp_path / "links", "uses").iterdir()}
    assert found == {"shared", *(f"{name}-1.dist-info" for name in ("uses", "all_parts", "one_part", "base"))}
