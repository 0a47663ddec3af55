"""Every Python example in a README or a page of the site runs as it stands, blocks of one file one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from release.archives import links

ROOT = Path(__file__).parent.parent
READMES = sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("apps/*/README.md")])
PAGES = sorted(page for page in ROOT.glob("docs/**/*.md") if "```python\n" in page.read_text())
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_run(page, forked, tmp_path):
    blocks = PYTHON.findall(page.read_text())
    if page.name == "README.md" and (page.parent.parent.name == "packages" or page.parent == ROOT):
        assert blocks, "a package's README shows a first example"
    if any("MuonAdamW" in block for block in blocks) and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks))
    [done] = forked([script], [{}], 280, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("readme", READMES[1:], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_readme_is_for_who_just_found_it(readme):
    """What is long stands in a page of docs/."""
    assert len(readme.read_text().splitlines()) <= 120


SHOWN = sorted([*READMES, ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])


def anchors(page):
    """As headings are named where they are linked to: by their words, in small letters, joined by hyphens; and ids."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    words = (re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in plain)
    return {*words, *re.findall(r'<a id="([^"]+)">', text)}


@pytest.mark.parametrize("page", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"[a-z]+:", link):
            continue
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def paragraphs(text):
    """Of prose, as one line each; lists and headings are paragraphs too, code and tables are none."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    joined = (" ".join(each.split()) for each in prose.split("\n\n"))
    return [each for each in joined if len(each) > 100 and not each.startswith(("|", "#"))]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_readme_and_the_site_say_nothing_twice(readme):
    """A copy is not mended with what it was copied from."""
    site = {each: page for page in ROOT.glob("docs/**/*.md") for each in paragraphs(page.read_text())}
    twice = [(each, str(site[each])) for each in paragraphs(readme.read_text()) if each in site]
    assert not twice


def test_overviews_leave_no_package_and_no_guide_out():
    readme, nav = (ROOT / "README.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for folder in sorted(ROOT.glob("packages/*/")):
        name = folder.name
        assert f"**[{name}](packages/{name})**" in readme
        assert re.search(rf"^pip install .*\./packages/{name}\b", readme, re.MULTILINE), name
        assert f"packages/{name}.md" in nav
        assert f"reference/{name.replace('-', '_')}.md" in nav
    for guide in sorted(ROOT.glob("docs/guides/*.md")):
        assert f"](docs/guides/{guide.name})" in readme
        assert f"guides/{guide.name}" in nav


def test_the_ways_through_the_code_name_files_that_there_are():
    sources = [*ROOT.glob("packages/*/src"), *ROOT.glob("apps/*/src")]
    ways = (ROOT / "docs" / "how-it-works.md").read_text().partition("## Three ways")[2]
    for row in re.findall(r"^\| (`[^|]*) \|", ways, re.MULTILINE):
        for name in re.findall(r"`([\w/.]+)`", row):
            assert any(any(folder.rglob(name.rstrip("/"))) for folder in sources), name
