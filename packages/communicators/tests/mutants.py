"""Mutants of bytes, texts and states, drawn by seed; and what may come of one: a result, or an error with a name.

Bytes are flipped, cut, grown, exchanged, overwritten, and numbers in them set to extremes. Structures lose keys and
gain others, and have values of other types, shapes and sizes in place of theirs.
"""

import copy
import io
import json
import random
import time
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

EXTREMES = (0, 1, -1, 127, 255, 1 << 15, (1 << 31) - 1, -(1 << 31), 1 << 32, (1 << 63) - 1, -(1 << 63))
STRANGE = (
    None,
    True,
    False,
    -1,
    0,
    1 << 40,
    1 << 70,
    -1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    b"x",
    [],
    {},
    [[]],
    (),
)
SECONDS = 5.0
"""Longest time that one mutant may take; a busy machine stands still for a while."""


def mutated(content: bytes, dice: random.Random) -> bytes:
    """Bytes with one to three changes."""
    for _ in range(dice.randint(1, 3)):
        content = _changed(content, dice)
    return content


def _changed(content: bytes, dice: random.Random) -> bytes:
    if not content:
        return dice.randbytes(dice.randint(0, 40))
    at, other = sorted(dice.randrange(len(content) + 1) for _ in range(2))
    match dice.randrange(8):
        case 0:
            flipped = bytearray(content)
            flipped[at - 1] ^= 1 << dice.randrange(8)
            return bytes(flipped)
        case 1:
            return content[:at]
        case 2:
            return content + dice.randbytes(dice.randint(1, 40))
        case 3:
            return content[:at] + dice.randbytes(other - at) + content[other:]
        case 4:
            return content[other:] + content[at:other] + content[:at]
        case 5:
            width = dice.choice([1, 2, 4, 8])
            number = dice.choice(EXTREMES) % (1 << 8 * width)
            return content[:at] + number.to_bytes(width, "little") + content[at + width :]
        case 6:
            return content[:at] + content[other:]
        case _:
            return bytes(dice.choice([0, 255]) for _ in content[:1]) * len(content)


def mutated_state(state: Any, dice: random.Random) -> Any:
    """Copy of a structure with one change at a place that is drawn, of all levels alike."""
    state = copy.deepcopy(state)
    places = list(_places(state))
    holder, key = dice.choice(places)
    value = holder[key]
    kind = dice.randrange(6)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
    elif kind == 0:
        del holder[key:]
    elif kind == 1 and isinstance(holder, dict):
        holder[dice.choice(["extra", 7, f"{key}x"])] = value
    elif kind == 1:
        holder.append(value)
    elif kind == 2:
        other_holder, other = dice.choice(places)
        holder[key], other_holder[other] = other_holder[other], value
    elif isinstance(value, Tensor):
        holder[key] = _other_tensor(value, dice)
    else:
        holder[key] = dice.choice(STRANGE)
    return state


def _places(state: Any) -> Any:
    """Every container that can be changed, with each of its keys."""
    if isinstance(state, dict | list):
        for key in list(state) if isinstance(state, dict) else range(len(state)):
            yield state, key
            yield from _places(state[key])
    elif isinstance(state, tuple):
        for part in state:
            yield from _places(part)


def _other_tensor(tensor: Tensor, dice: random.Random) -> Any:
    changes: list[Callable[[], Any]] = [
        lambda: tensor.new_zeros(*tensor.shape, 2),
        lambda: tensor.reshape(-1)[:-1],
        lambda: tensor.new_zeros(0),
        lambda: tensor.new_zeros(1).expand(1 << 40),
        lambda: tensor.to(torch.complex64) if tensor.dtype != torch.uint8 else tensor.float(),
        lambda: tensor.to(torch.int32),
        lambda: torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else torch.full_like(tensor, 0),
        lambda: tensor.to_sparse() if tensor.dim() else tensor,
        lambda: tensor.to("meta"),
        lambda: tensor.tolist(),
        lambda: dice.choice(STRANGE),
    ]
    return dice.choice(changes)()


def mutated_json(text: str, dice: random.Random) -> str:
    """JSON with a change of its structure, or of its letters."""
    if dice.random() < 0.6:
        held = [json.loads(text)]
        changed = mutated_state(held, dice)
        return json.dumps(changed[0] if changed else None, default=str)
    if dice.random() < 0.1:
        return dice.choice(
            ["[" * 900, "9" * 900, "NaN", "1e999", '{"a":' * 400, '"\\ud800"', "null", "[]", "{}", '"x"']
        )
    return mutated(text.encode(), dice).decode(errors="replace")


def saved(state: Any) -> bytes:
    """The state as torch.save writes it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def mutated_archive(content: bytes, dice: random.Random) -> bytes:
    """What torch.save gave, changed as a whole; or one of its parts, so that the archive itself is sound."""
    if dice.random() < 0.4:
        return mutated(content, dice)
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        names = old.namelist()
        pickled = next(name for name in names if name.endswith("data.pkl"))
        target = pickled if dice.random() < 0.8 else dice.choice(names)
        for name in names:
            part = old.read(name)
            new.writestr(name, mutated(part, dice) if name == target else part)
    return made.getvalue()


class Foreign:
    """Pickled as a call of os.system, which makes a file."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch {self.path}",)


class Tally:
    """Outcomes of mutants.

    named: classes of errors that are an answer; each says more than nothing. refused, taken: how many mutants came to
    an error, and to a result. faults: all others, by the first place where each kind came up.
    """

    def __init__(self, *named: type[BaseException]) -> None:
        self.named, self.refused, self.taken = named, 0, 0
        self.faults: dict[str, int] = {}

    def attempt(self, act: Callable[[], object], what: str = "") -> bool:
        """Whether it came to a result."""
        began = time.monotonic()
        try:
            act()
        except self.named as error:
            self.refused += 1
            if type(error) not in self.named or not str(error):
                self.note(f"{what}: {type(error).__name__} says {str(error)[:60]!r}")
            return False
        except Exception as error:
            self.note(f"{what}: {type(error).__name__}: {str(error)[:90]}")
            return False
        finally:
            if (took := time.monotonic() - began) > SECONDS:
                self.note(f"{what}: took {took:.0f} s")
        self.taken += 1
        return True

    def note(self, said: str) -> None:
        """Notes a fault."""
        self.faults[said] = self.faults.get(said, 0) + 1

    def check(self, total: int) -> None:
        """Raises AssertionError unless all mutants came to one of the two, and some to either."""
        said = "\n".join(f"{n} × {fault}" for fault, n in self.faults.items())
        assert not said, said
        assert self.refused + self.taken == total
        assert self.refused


def equal(one: Any, other: Any) -> bool:
    """Whether two states are the same, tensors bit for bit."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, Mapping):
        same = isinstance(other, Mapping) and list(one) == list(other)
        return same and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and (one == other or one != one)
