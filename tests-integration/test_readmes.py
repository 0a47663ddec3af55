"""Every Python example in a README runs as it stands, blocks of one file one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("apps/*/README.md")])
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_run(readme, forked, tmp_path):
    blocks = PYTHON.findall(readme.read_text())
    if readme.parent.parent.name == "packages" or readme.parent == ROOT:
        assert blocks, "a package's README shows a first example"
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks))
    [done] = forked([script], [{}], 120, tmp_path)
    assert done.returncode == 0, done.stderr
