"""Any folder with lists of its sound files and what they say: DIR/train.csv and DIR/test.csv, or .tsv, or .jsonl.

The first line of csv and tsv names the columns; jsonl has an object a line. Names of the column with the file: path,
wav_filename, audio_filepath, audio; with the words: transcript, sentence, text. A csv file without such a line has the
file and the transcript, or the name of a text file (.txt) that has it, as DeepSpeech's AN4 manifests do. Files are
looked for beside the list, and where they say.
"""

import csv
import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from trainer.data.faults import Faults
from trainer.data.files import read_text
from trainer.errors import RunError

from deepspeech.data.transcripts import transcript_of
from deepspeech.data.utterances import Corpus, Utterance
from deepspeech.sound.audio import read_sound, samples_in

PATHS = ("path", "wav_filename", "audio_filepath", "audio")
TEXTS = ("transcript", "sentence", "text")
SUFFIXES = (".csv", ".tsv", ".jsonl")

Row = tuple[str, str, str]  # path, transcript, place


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
    utterances = []
    for row in rows(manifest, read_text(manifest)):
        with faults.one():
            utterances.append(_utterance(manifest.parent, row))
    return utterances


def _utterance(folder: Path, row: Row | RunError) -> Utterance:
    if isinstance(row, RunError):
        raise row
    name, text, place = row
    path = folder / name
    transcript = transcript_of(read_text(folder / text) if text.endswith(".txt") else text, place)
    samples, read = samples_in(path), partial(read_sound, path)
    return Utterance(name=str(path), transcript=transcript, samples=samples, read=read, listed=place)


def _table_rows(manifest: Path, text: str) -> Iterator[Row | RunError]:
    quoting = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if manifest.suffix == ".tsv" else {}
    lines = csv.reader(io.StringIO(text, newline=""), **quoting)  # type: ignore[arg-type]
    columns: tuple[int, int] | None = None
    for fields in _fields(lines, manifest):
        place = f"{manifest}, line {lines.line_num}"
        if columns is None:
            columns = _columns(fields, place)
            if columns is not None:
                continue
            columns = (0, 1)
        if not fields:
            continue
        if len(fields) <= max(columns):
            yield RunError(f"{place} has {len(fields)} columns, expected a file and a transcript")
        else:
            yield fields[columns[0]], fields[columns[1]], place


def _fields(lines: Any, manifest: Path) -> Iterator[list[str]]:
    """What a csv reader gives; RunError where it cannot."""
    try:
        yield from lines
    except csv.Error as error:  # such as a quotation mark that never ends
        raise RunError(f"{manifest}, line {lines.line_num}, is no line of a table ({error})") from None


def _columns(fields: list[str], place: str) -> tuple[int, int] | None:
    """Where the file and the words are; None for a line that is not of names."""
    found = [next((fields.index(name) for name in names if name in fields), None) for names in (PATHS, TEXTS)]
    if found == [None, None] and len(fields) == 2:
        return None
    path, text = found
    if path is None or text is None:
        raise RunError(f"{place}: expected columns {' or '.join(PATHS)}, and {' or '.join(TEXTS)}, not {fields!r:.100}")
    return path, text


def _json_rows(manifest: Path, text: str) -> Iterator[Row | RunError]:
    for number, line in enumerate(text.split("\n"), 1):
        place = f"{manifest}, line {number}"
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            path = next(entry[name] for name in PATHS if name in entry)
            words = next(entry[name] for name in TEXTS if name in entry)
            if not (isinstance(path, str) and isinstance(words, str)):
                raise TypeError
        except (ValueError, TypeError, StopIteration, RecursionError):
            yield RunError(f"{place}: expected an object with {' or '.join(PATHS)}, and {' or '.join(TEXTS)}")
        else:
            yield path, words, place
