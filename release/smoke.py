"""Run inside an environment: is each package whole? `python smoke.py first|all NAME...`.

`first`: every module can be imported, and the first example of the page that an index shows runs; `all`: every example.
Modules that ask for what an extra brings may be missing it. Nothing of the tree is imported here.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import distribution, metadata

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
OPTIONAL = {"triton", "hypothesis"}  # with CUDA builds of torch; with the extra [testing] of communicators


def modules_of(name: str) -> list[str]:
    """Every module that a distribution installed; a `__main__` would start something."""
    files = [file for file in distribution(name).files or () if file.suffix == ".py" and file.name != "__main__.py"]
    parts = [file.with_suffix("").parts for file in files]
    return sorted({".".join(each[:-1] if each[-1] == "__init__" else each) for each in parts})


def import_all(name: str) -> int:
    """Imports each module; the number of them that an extra's absence left out."""
    extras = [line for line in distribution(name).requires or () if "extra ==" in line]
    names = {re.split(r"[^\w-]", line)[0] for line in extras}
    optional = OPTIONAL | {name.removeprefix("thinwire-").replace("-", "_") for name in names}
    left_out = 0
    for module in modules_of(name):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in optional:
                raise
            left_out += 1
    return left_out


def main(which: str, *names: str) -> None:
    """Raises what goes wrong; else says how much was tried."""
    for name in names:
        left_out = import_all(name) if which == "first" else 0
        examples = PYTHON.findall(metadata(name)["Description"])
        if which == "first":
            examples = examples[:1]
        space: dict[str, object] = {"__name__": "__main__"}
        for number, example in enumerate(examples, 1):
            exec(compile(example, f"<{name}, example {number}>", "exec"), space)  # noqa: S102 - examples of our own READMEs
        version = metadata(name)["Version"]
        print(f"{name} {version}: {len(examples)} examples, {left_out} modules wait for an extra")


if __name__ == "__main__":
    main(*sys.argv[1:])
