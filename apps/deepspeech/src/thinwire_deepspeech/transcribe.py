"""`python -m thinwire_deepspeech transcribe RUN FILE…`: what a trained model hears in sound files."""

from collections.abc import Sequence
from pathlib import Path

import torch
from thinwire_trainer.app import App
from thinwire_trainer.command_line import quantities
from thinwire_trainer.command_line.parser import Parser
from thinwire_trainer.errors import RunError
from thinwire_trainer.trained import trained

from thinwire_deepspeech.decoding import LABELS, Word, beam_search, decoded, greedy, words
from thinwire_deepspeech.model import DeepSpeech2
from thinwire_deepspeech.recognition import frame_seconds, size_of
from thinwire_deepspeech.sound import read_sound, spectrogram


def main(app: App, argv: Sequence[str]) -> int:
    """Prints a line a file, and with --words one a word; returns the exit code."""
    parser = Parser(
        prog=f"{app.module} transcribe",
        usage="python -m %(prog)s RUN FILE… [--words] [--beam N]",
        description="Prints what the model of a run hears in sound files (16 kHz).",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder that --output named")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="wav, flac or sph")
    parser.add_argument("--words", action="store_true", help="the times of each word, too, in seconds")
    parser.add_argument(
        "--beam", type=quantities.count, metavar="N", help="search with so many beams (default: greedy)"
    )
    given = parser.parse_args(argv)
    model = _model(app, given.run)
    for file in given.files:
        text, found = transcribed(model, file, beam=given.beam)
        print(f"{file}: {text}")
        for word in found if given.words else ():
            print(f"{word.start:8.2f} {word.end:8.2f}  {word.text}")
    return 0


def _model(app: App, path: Path) -> DeepSpeech2:
    run = trained(app, path)
    if run.kept.get("labels", LABELS) != LABELS:
        raise RunError(f"{path} was trained with other labels ({run.kept['labels']!r:.80})")
    model = DeepSpeech2(size_of(run.options), labels=len(LABELS))
    run.into(model)
    return model


@torch.no_grad()
def transcribed(model: DeepSpeech2, file: Path, *, beam: int | None = None) -> tuple[str, list[Word]]:
    """The text of a sound file, and its words with their times; RunError for a file that cannot be read."""
    heard = spectrogram(read_sound(file))
    log_probabilities = model(heard[None], torch.tensor([heard.shape[1]]))[0][:, 0].double().numpy()
    labels = greedy(log_probabilities) if beam is None else beam_search(log_probabilities, width=beam)
    found = words(log_probabilities, labels, frame=frame_seconds(model.size))
    return " ".join(decoded(labels).split()), found
