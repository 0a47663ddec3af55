"""Small data sets in the published formats, and quick runs."""

from pathlib import Path

from communicators import SimulatedWorld
from thinwire_text.__main__ import APP
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.run import run

PTB = {
    "train": " the cat sat on the <unk> \n the dog sat on N mats \n a cat and a dog ran \n" * 12,
    "valid": " the cat ran \n",
    "test": " a dog sat on the cat \n the dog ran \n",
}
REVIEWS = {
    "pos": ("A wonderful film.<br /><br />I loved it!", "Truly wonderful, wonderful acting", "I loved the cast"),
    "neg": ("A dreadful film; I hated it.", "Dreadful. Don't watch!", "I hated the cast, and the plot"),
}


def ptb(folder: Path) -> Path:
    """ptb.train.txt and the others."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in PTB.items():
        (folder / f"ptb.{name}.txt").write_text(text)
    return folder


def imdb(folder: Path) -> Path:
    """aclImdb/train/pos/0_9.txt and the others."""
    for split in ("train", "test"):
        for side, texts in REVIEWS.items():
            (folder / "aclImdb" / split / side).mkdir(parents=True)
            for number, text in enumerate(texts):
                rating = 9 if side == "pos" else 2
                (folder / "aclImdb" / split / side / f"{number}_{rating}.txt").write_text(text)
    return folder


def asked(*words: str, ranks: int | None = None) -> Options:
    return parse(list(words), APP, world_size=ranks)


def train(options: Options, ranks: int) -> None:
    SimulatedWorld(ranks, own_generators=True).run(lambda comm: run(APP, options, comm))
