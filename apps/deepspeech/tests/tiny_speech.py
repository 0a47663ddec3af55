"""Data sets of a few short sounds, as each is published. A letter is a tone; nobody speaks."""

from pathlib import Path

import numpy as np
import soundfile

RATE = 16_000


def sound(text: str, *, letter: float = 0.1) -> np.ndarray:
    """float64 [samples]: a tone for each letter, higher in the alphabet higher, and a pause for a space."""
    time = np.arange(int(letter * RATE)) / RATE
    tones = [np.sin(2 * np.pi * (200 + 120 * (ord(c) - ord("A"))) * time) * (c != " ") for c in text]
    return 0.3 * np.concatenate(tones)


def an4(folder: Path, *, suffix: str = ".raw", order: str = ">i2") -> Path:
    """etc/ and wav/ as the archives have them; returns the folder an4."""
    parts = {
        "train": ("an4_clstk/fash", {"an251-fash-b": "YES", "an253-fash-b": "GO DO"}, "<s> {} </s> ({})"),
        "test": ("an4test_clstk/fcaw", {"an406-fcaw-b": "RUBOUT"}, "{} ({})"),
    }
    root = folder / "an4"
    (root / "etc").mkdir(parents=True)
    for part, (speaker, said, form) in parts.items():
        (root / "wav" / speaker).mkdir(parents=True)
        (root / "etc" / f"an4_{part}.fileids").write_text("".join(f"{speaker}/{name}\n" for name in said))
        lines = "".join(form.format(text, name) + "\n" for name, text in said.items())
        (root / "etc" / f"an4_{part}.transcription").write_text(lines)
        for name, text in said.items():
            path, samples = root / "wav" / speaker / (name + suffix), sound(text)
            if suffix == ".raw":
                path.write_bytes((samples * 32767).astype(order).tobytes())
            elif suffix == ".sph":
                path.write_bytes(sphere(samples))
            else:
                soundfile.write(path, samples, RATE)
    return root


def sphere(samples: np.ndarray) -> bytes:
    """A NIST SPHERE file, 16 bit with the high byte first, with the fields that AN4's have."""
    fields = [
        "database_id -s3 AN4",
        "channel_count -i 1",
        f"sample_count -i {len(samples)}",
        f"sample_rate -i {RATE}",
        "sample_n_bytes -i 2",
        "sample_byte_format -s2 10",
        "sample_sig_bits -i 16",
        "sample_coding -s3 pcm",
        "end_head",
    ]
    head = "NIST_1A\n   1024\n" + "\n".join(fields) + "\n"
    return head.encode().ljust(1024) + (samples * 32767).astype(">i2").tobytes()


def librispeech(folder: Path) -> Path:
    """Two parts; returns the folder LibriSpeech."""
    root = folder / "LibriSpeech"
    for part, texts in {
        "train-clean-100": ("IT'S A", "BEAD"),
        "test-clean": ("CAB",),
        "test-other": ("DAB A",),
    }.items():
        chapter = root / part / "19" / "198"
        chapter.mkdir(parents=True)
        names = [f"19-198-{number:04}" for number in range(len(texts))]
        lines = "".join(f"{name} {text}\n" for name, text in zip(names, texts, strict=True))
        (chapter / "19-198.trans.txt").write_text(lines)
        for name, text in zip(names, texts, strict=True):
            soundfile.write(chapter / f"{name}.flac", sound(text), RATE)
    return root


def manifest(folder: Path, *, train: int = 6, tests: int = 3) -> Path:
    """Sounds of one to four letters, and csv files that list them; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [("ABCDBACDDACB" * 2)[number : number + 1 + number % 4] for number in range(train + tests)]
    for part, numbers in {"train": range(train), "test": range(train, train + tests)}.items():
        rows = []
        for number in numbers:
            soundfile.write(folder / f"{number}.wav", sound(texts[number], letter=0.2), RATE)
            rows.append(f"{number}.wav,{texts[number].lower()}\n")
        (folder / f"{part}.csv").write_text("path,transcript\n" + "".join(rows))
    return folder


def damaged_inside(folder: Path) -> None:
    """LibriSpeech with a flac file whose end is whole, so that only its middle tells."""
    path = librispeech(folder) / "train-clean-100" / "19" / "198" / "19-198-0001.flac"
    content = bytearray(path.read_bytes())
    middle = len(content) // 3
    content[middle : middle + 300] = bytes(300)
    path.write_bytes(content)
