"""Utterances that cannot be used: an error that names the file and the fault, or, where asked for, left out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import RunError

from deepspeech.decoding.alphabet import unknown


@dataclass
class Faults:
    """skip: leave utterances with a fault out. found: why, for each that was."""

    skip: bool
    found: list[str] = field(default_factory=list)

    @contextmanager
    def one(self) -> Iterator[None]:
        """The block reads what belongs to one utterance."""
        try:
            yield
        except RunError as error:
            if not self.skip:
                raise RunError(f"{error} (--skip-bad leaves such utterances out, and counts them)") from None
            self.found.append(str(error))


def text_of(path: Path) -> str:
    """A file's text; RunError where it is missing or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise RunError(
            f"{path}, line {line}, is not UTF-8 (byte {error.object[error.start]:#04x}): convert it"
        ) from None


def transcript_of(text: str, place: str) -> str:
    """In capitals, with single spaces; RunError, naming the place, where it is empty or says what has no label."""
    transcript = " ".join(text.upper().split())
    if not transcript:
        raise RunError(f"{place}: the transcript is empty")
    if strange := unknown(transcript):
        shown = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in strange[:5])
        raise RunError(
            f"{place}: the transcript has {shown}, expected letters A to Z, apostrophes and spaces: spell it out"
        )
    return transcript
