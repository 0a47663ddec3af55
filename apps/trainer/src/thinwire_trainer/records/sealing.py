"""JSON with its own checksum: a single byte that has changed is found."""

import hashlib
import json
from pathlib import Path
from typing import Any

from thinwire_trainer.errors import DamagedError
from thinwire_trainer.records.durable import opened


def sealed(content: dict[str, Any]) -> str:
    """The file's text: the content and its own checksum."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"content": content, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def unsealed(path: Path) -> dict[str, Any]:
    """The content of such a file; DamagedError if a single byte of it has changed, or it is none."""
    with opened(path) as file:
        text = file.read()
    try:
        content: dict[str, Any] = json.loads(text)["content"]
        intact = sealed(content).encode() == text
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise DamagedError(f"{path} is damaged: its checksum is another one")
    return content
