"""Any folder with lists of its sound files and what they say: DIR/train.csv and DIR/test.csv, or .tsv, or .jsonl.

The first line of csv and tsv names the columns; jsonl has an object a line. Names of the column with the file: path,
wav_filename, audio_filepath, audio; with the words: transcript, sentence, text. A csv file without such a line has the
file and the transcript, or the name of a text file (.txt) that has it, as DeepSpeech's AN4 manifests do. Files are
looked for beside the list, and where they say. jsonl may say which part of a file: offset and duration, in seconds.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from thinwire_trainer.data import Faults, read_text
from thinwire_trainer.errors import RunError

from thinwire_deepspeech.data.utterances import Corpus, Utterance, transcript_of
from thinwire_deepspeech.sound import RATE, SHORTEST, read_sound, samples_in

PATHS = ("path", "wav_filename", "audio_filepath", "audio")
TEXTS = ("transcript", "sentence", "text")
ROUNDED = 0.01  # seconds, of a duration that means the end
SUFFIXES = (".csv", ".tsv", ".jsonl")


class Row(NamedTuple):
    """place: in the list, for messages. offset, duration: seconds, of a part of the file; None: to its end."""

    path: str
    transcript: str
    place: str
    offset: float = 0.0
    duration: float | None = None


def load(data_dir: Path, *, faults: Faults) -> Corpus:
    """Both parts; RunError for what is missing or damaged."""
    train, test = (_part(_found(data_dir, part), faults) for part in ("train", "test"))
    return Corpus(train=train, tests={"test": test})


def _found(folder: Path, part: str) -> Path:
    there = [path for suffix in SUFFIXES if (path := folder / f"{part}{suffix}").is_file()]
    if len(there) != 1:
        names = " or ".join(f"{part}{suffix}" for suffix in SUFFIXES)
        raise RunError(f"{folder} has {len(there)} of {names}, expected one: the list of sound files and transcripts")
    return there[0]


def _part(manifest: Path, faults: Faults) -> list[Utterance]:
    rows = _json_rows if manifest.suffix == ".jsonl" else _table_rows
    return faults.usable(partial(_utterance, manifest.parent, row) for row in rows(manifest, read_text(manifest)))


def _utterance(folder: Path, read_row: Callable[[], Row]) -> Utterance:
    row = read_row()
    path, text, place = folder / row.path, row.transcript, row.place
    transcript = transcript_of(read_text(folder / text) if text.endswith(".txt") else text, place)
    start, samples = _part_of_file(path, row)
    read = partial(read_sound, path, start=start, samples=samples)
    return Utterance(name=str(path), transcript=transcript, samples=samples, read=read, listed=place)


def _part_of_file(path: Path, row: Row) -> tuple[int, int]:
    """Its first sample, and how many; RunError where the file has no such part."""
    there, start = samples_in(path), round(row.offset * RATE)
    rest = there - start
    wanted = rest if row.duration is None else round(row.duration * RATE)
    if abs(wanted - rest) <= ROUNDED * RATE:
        wanted = rest
    if not SHORTEST <= wanted <= rest:
        part = f"{wanted / RATE:g} s from {row.offset:g} s on"
        raise RunError(f"{row.place}: {part} are no part of {path}, which lasts {there / RATE:g} s, or too short a one")
    return start, wanted


def _table_rows(manifest: Path, text: str) -> Iterator[Callable[[], Row]]:
    """Line by line: no transcript has an end of line, so that a stray quotation mark spoils its own line alone."""
    lines = [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]
    first = _fields(lines[0], manifest.suffix, f"{manifest}, line 1")
    columns = _columns(first, f"{manifest}, line 1")
    for number, line in enumerate(lines, 1):
        if line and not (columns and number == 1):
            yield partial(
                _table_row, line, f"{manifest}, line {number}", manifest.suffix, columns or (0, 1), len(first)
            )


def _table_row(line: str, place: str, suffix: str, columns: tuple[int, int], width: int) -> Row:
    fields = _fields(line, suffix, place)
    if len(fields) != width:
        raise RunError(f"{place} has {len(fields)} columns, expected {width}")
    return Row(fields[columns[0]], fields[columns[1]], place)


def _fields(line: str, suffix: str, place: str) -> list[str]:
    """Columns of this line."""
    quoting = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {"strict": True}
    try:
        return next(csv.reader([line], **quoting), [])
    except csv.Error as error:  # such as a quotation mark that never ends
        raise RunError(f"{place}, is no line of a table ({error})") from None


def _columns(fields: list[str], place: str) -> tuple[int, int] | None:
    """Columns of the file and of the words; None for a line that is not of names."""
    named = [field.strip().lower() for field in fields]
    path, text = (_only([name for name in named if name in names], place) for names in (PATHS, TEXTS))
    if path is None and text is None and len(fields) == 2:
        return None
    if path is None or text is None:
        raise RunError(f"{place}: expected columns {' or '.join(PATHS)}, and {' or '.join(TEXTS)}, not {fields!r:.100}")
    return named.index(path), named.index(text)


def _only(found: list[str], place: str) -> str | None:
    """The one of them, if any."""
    if len(found) > 1:
        raise RunError(f"{place} has {' and '.join(found)}, which mean the same: leave one of them")
    return found[0] if found else None


def _json_rows(manifest: Path, text: str) -> Iterator[Callable[[], Row]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield partial(_json_row, line, f"{manifest}, line {number}")


def _json_row(line: str, place: str) -> Row:
    expected = RunError(f"{place}: expected an object with {' or '.join(PATHS)}, and {' or '.join(TEXTS)}")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise expected from None
    if not isinstance(entry, dict):
        raise expected
    path, text = (_only([name for name in names if name in entry], place) for names in (PATHS, TEXTS))
    if not (isinstance(entry.get(path), str) and isinstance(entry.get(text), str)):
        raise expected
    offset = _seconds(entry.get("offset"), "offset", place)
    return Row(entry[path], entry[text], place, offset or 0.0, _seconds(entry.get("duration"), "duration", place))


def _seconds(value: object, name: str, place: str) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < 1e9:  # type: ignore[operator]
        raise RunError(f"{place}: the {name} is {value!r:.40}, expected seconds")
    return float(value)  # type: ignore[arg-type]
