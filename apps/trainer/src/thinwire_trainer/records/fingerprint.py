"""What tells the data of one run from those of another, for `thinwire_trainer.app.Keeps`."""

import hashlib
from collections.abc import Iterable

from torch import Tensor


def fingerprint(parts: Iterable[Tensor | str]) -> str:
    """A checksum of these parts in their order, and of how many there are: "3 parts, sha256 …".

    Tensors: any dtype that numpy has, on any device; shape and dtype count, too.
    """
    digest, count = hashlib.sha256(), 0
    for part in parts:
        count += 1
        if isinstance(part, str):
            content, kind = memoryview(part.encode()), "text"
        else:
            array = part.detach().cpu().contiguous().numpy()
            content, kind = array.reshape(-1).view("uint8").data, f"{array.dtype}{array.shape}"
        digest.update(f"{kind} {len(content)} ".encode())
        digest.update(content)
    return f"{count} parts, sha256 {digest.hexdigest()}"
