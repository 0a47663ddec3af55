"""AN4 (CMU, 1991): 948 and 130 utterances of spelling and numbers, as its archives unpack.

DIR/an4/etc/an4_train.fileids, an4_train.transcription, an4_test.…
DIR/an4/wav/an4_clstk/SPEAKER/ID.raw (16 bit, 16 kHz, either byte order), .sph or .wav; an4test_clstk/…
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from thinwire_trainer.data import Faults, read_text
from thinwire_trainer.errors import RunError
from torch import Tensor

from thinwire_deepspeech.data.utterances import Corpus, Utterance, transcript_of
from thinwire_deepspeech.sound import read_raw, read_sound, samples_in, samples_in_raw

LINE = re.compile(r"(?:<s>)?(?P<text>.*?)(?:</s>)?\s*\((?P<id>[^()]+)\)\s*")
SUFFIXES: dict[str, tuple[Callable[[Path], int], Callable[[Path], Tensor]]] = {
    ".raw": (samples_in_raw, read_raw),
    ".sph": (samples_in, read_sound),
    ".wav": (samples_in, read_sound),
}


def load(data_dir: Path, *, faults: Faults) -> Corpus:
    """Both parts; RunError for what is missing or damaged."""
    folder = data_dir / "an4" if (data_dir / "an4").is_dir() else data_dir
    if not (folder / "etc" / "an4_train.fileids").is_file():
        raise RunError(
            f"missing: {data_dir}/an4/etc/an4_train.fileids and what belongs to it; unpack an4_sphere.tar.gz or "
            f"an4_raw.bigendian.tar.gz (CMU Robust Speech Group's AN4 page) in {data_dir}"
        )
    train, test = (_part(folder, part, faults) for part in ("train", "test"))
    return Corpus(train=train, tests={"test": test})


def _part(folder: Path, part: str, faults: Faults) -> list[Utterance]:
    ids, transcripts = folder / "etc" / f"an4_{part}.fileids", folder / "etc" / f"an4_{part}.transcription"
    names, every = read_text(ids).split(), enumerate(read_text(transcripts).splitlines(), 1)
    lines = [(number, line) for number, line in every if line.strip()]
    if len(names) != len(lines):
        raise RunError(
            f"{ids} names {len(names)} files, {transcripts} has {len(lines)} lines: unpack the archive again"
        )
    return faults.usable(
        partial(_utterance, folder / "wav" / name, line, f"{transcripts}, line {number}")
        for name, (number, line) in zip(names, lines, strict=True)
    )


def _utterance(stem: Path, line: str, place: str) -> Utterance:
    match = LINE.fullmatch(line)
    if match is None or match["id"] != stem.name:
        raise RunError(f"{place} is {line!r:.80}, expected the words and ({stem.name})")
    transcript = transcript_of(match["text"], place)
    for suffix, (count, read) in SUFFIXES.items():
        path = stem.with_name(stem.name + suffix)
        if path.exists():
            return Utterance(
                name=str(path),
                transcript=transcript,
                samples=count(path),
                read=partial(read, path),
                listed=f"{place}, and its line of .fileids",
            )
    raise RunError(f"{stem} is missing, with each of {', '.join(SUFFIXES)}")
