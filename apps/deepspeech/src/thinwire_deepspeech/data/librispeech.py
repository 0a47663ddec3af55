"""LibriSpeech (Panayotov et al. 2015) as its archives unpack: flac files with their *.trans.txt beside them.

    DIR/LibriSpeech/train-clean-100/SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt, SPEAKER-CHAPTER-0000.flac …

All train-* folders that are there are trained on, all test-* are tested with, or dev-* where there are none.
"""

from functools import partial
from pathlib import Path

from thinwire_trainer.data import Faults, read_text
from thinwire_trainer.errors import RunError

from thinwire_deepspeech.data.utterances import Corpus, Utterance, transcript_of
from thinwire_deepspeech.sound import read_sound, samples_in


def load(data_dir: Path, *, faults: Faults) -> Corpus:
    """The parts that are there; RunError for what is missing or damaged."""
    folder = data_dir / "LibriSpeech" if (data_dir / "LibriSpeech").is_dir() else data_dir
    train, test = _parts(folder, "train-"), _parts(folder, "test-") or _parts(folder, "dev-")
    if not train or not test:
        raise RunError(
            f"missing: {data_dir}/LibriSpeech/{'train-*' if not train else 'test-* or dev-*'}; unpack archives of "
            f"https://www.openslr.org/12 in {data_dir}"
        )
    return Corpus(
        train=[utterance for part in train for utterance in _part(part, faults)],
        tests={part.name: _part(part, faults) for part in test},
    )


def _parts(folder: Path, beginning: str) -> list[Path]:
    return sorted(path for path in folder.glob(f"{beginning}*") if path.is_dir())


def _part(folder: Path, faults: Faults) -> list[Utterance]:
    return faults.usable(
        partial(_utterance, transcripts, line, f"{transcripts}, line {number}")
        for transcripts in sorted(folder.glob("*/*/*.trans.txt"))
        for number, line in enumerate(read_text(transcripts).splitlines(), 1)
    )


def _utterance(transcripts: Path, line: str, place: str) -> Utterance:
    name, _, text = line.strip().partition(" ")
    transcript = transcript_of(text, place)
    path = transcripts.with_name(f"{name}.flac")
    samples, read = samples_in(path), partial(read_sound, path)
    return Utterance(name=str(path), transcript=transcript, samples=samples, read=read, listed=place)
