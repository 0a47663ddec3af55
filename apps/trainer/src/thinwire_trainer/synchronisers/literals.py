"""Names that a package knows, without importing it and with it torch: flags are checked before that."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def literal_dict(module: str, name: str, package: str = "sparse_collectives") -> list[str]:
    """The keys, in order, of a dict that stands as such in a source. Raises LookupError where there is none."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise LookupError(f"{package} is not installed")
    for node in ast.parse((Path(spec.origin).parent / f"{module}.py").read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Dict):
                return [str(ast.literal_eval(key)) for key in value.keys if key is not None]
    raise LookupError(f"{package}.{module} has no literal dict {name}")
