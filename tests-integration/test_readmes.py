"""Every Python example in a README or a page of the site runs as it stands, blocks of one file one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("apps/*/README.md")])
PAGES = sorted(page for page in ROOT.glob("docs/**/*.md") if "```python\n" in page.read_text())
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_run(page, forked, tmp_path):
    blocks = PYTHON.findall(page.read_text())
    if page.name == "README.md" and (page.parent.parent.name == "packages" or page.parent == ROOT):
        assert blocks, "a package's README shows a first example"
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks))
    [done] = forked([script], [{}], 120, tmp_path)
    assert done.returncode == 0, done.stderr
