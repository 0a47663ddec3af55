"""The readers, on small files in the published formats and on broken ones."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import text_files
from thinwire_text.data import imdb, ptb, pydoc
from thinwire_text.data.corpus import END, UNKNOWN, Vocabulary, words
from thinwire_trainer.data import Faults
from thinwire_trainer.errors import RunError

STRICT = Faults(skip=False)


def test_pydoc_is_a_small_corpus_whose_test_paragraphs_are_not_trained_on() -> None:
    parts = pydoc.paragraphs()
    assert len(parts) == len(set(parts)) > 1000
    assert len({*parts[9::10]} & {part for number, part in enumerate(parts) if number % 10 != 9}) == 0
    corpus = pydoc.load(Path("nowhere"))
    assert 50_000 < len(corpus.train) < 200_000
    assert 0.05 < len(corpus.test) / len(corpus.train) < 0.2
    assert corpus.vocabulary.tokens[:2] == (END, UNKNOWN)
    assert int((corpus.test == corpus.vocabulary.numbers[END]).sum()) == len(parts) // 10
    rare = (corpus.train == corpus.vocabulary.numbers[UNKNOWN]).double().mean()
    assert 0 < rare < 0.05


def test_the_same_python_gives_the_same_vocabulary() -> None:
    """Whatever the seed of its hashes, which decide the order of sets."""
    code = "from thinwire_text.data.pydoc import load; v = load(None).vocabulary; "
    code += "print(len(v), hash(('x',)) and v.tokens[2:9])"
    one, other = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**env(), "PYTHONHASHSEED": s})
        for s in "12"
    )
    assert one.stdout == other.stdout != ""


def env() -> dict[str, str]:
    import os

    return dict(os.environ)


def test_words_are_runs_of_letters_and_single_signs() -> None:
    assert words('The "for" statement;\n x[0] += 1') == [
        *(["The", '"', "for", '"', "statement", ";", "x", "[", "0", "]", "+", "=", "1"]),
    ]


def test_a_vocabulary_has_the_most_frequent_first_and_ties_by_the_alphabet() -> None:
    counted = Counter(["b", "b", "b", "a", "a", "c", "c", "d"])
    assert Vocabulary.of(counted, first=("<unk>",)).tokens == ("<unk>", "b", "a", "c", "d")
    assert Vocabulary.of(counted, least=2, most=2).tokens == ("b", "a")
    assert Vocabulary.of(counted, first=("<unk>",)).encode(["c", "x"]).tolist() == [3, 0]
    with pytest.raises(KeyError):
        Vocabulary.of(counted).encode(["x"])


@pytest.mark.parametrize("place", [".", "ptb", "simple-examples/data"])
def test_ptb_is_read_where_it_may_lie(tmp_path: Path, place: str) -> None:
    text_files.ptb(tmp_path / place)
    corpus = ptb.load(tmp_path, faults=STRICT)
    tokens = corpus.vocabulary.tokens
    assert len(tokens) == len(set(text_files.PTB["train"].split())) + 1
    line = " ".join(tokens[token] for token in corpus.test.tolist())
    assert line == "a dog sat on the cat <eos> the dog ran <eos>"
    assert len(corpus.train) == (7 + 7 + 7) * 12
    assert [tokens[t] for t in ptb.load(tmp_path, held_out="valid", faults=STRICT).test.tolist()] == [
        "the",
        "cat",
        "ran",
        "<eos>",
    ]


def fault(name: str, content: bytes | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (fault("ptb.train.txt", None), r"there is no .*ptb.train.txt.*: get it from http.*--data-dir"),
        (fault("ptb.test.txt", None), r"ptb.test.txt is missing"),
        (fault("ptb.train.txt", b" \n\n"), r"ptb.train.txt is empty"),
        (fault("ptb.train.txt", b"a b \xff c\n"), r"ptb.train.txt, line 1, is not UTF-8 \(byte 0xff\)"),
        (fault("ptb.test.txt", b"the cat\n the horse\n"), r"ptb.test.txt, line 2: horse is not a word of ptb.train"),
        (fault("ptb.test.txt", b"\nthe cat\n \n the horse\n"), r"ptb.test.txt, line 4: horse is not a word"),
    ],
)
def test_what_is_wrong_with_ptb_is_told_with_file_and_fault(
    tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    change(text_files.ptb(tmp_path))
    with pytest.raises(RunError, match=says):
        ptb.load(tmp_path, faults=STRICT)


def test_lines_of_ptb_that_cannot_be_used_may_be_left_out_and_are_counted(tmp_path: Path) -> None:
    text_files.ptb(tmp_path)
    (tmp_path / "ptb.test.txt").write_text("the horse\n the cat\n a zebra ran\n")
    faults = Faults(skip=True)
    corpus = ptb.load(tmp_path, faults=faults)
    assert (len(faults.found), len(corpus.test)) == (2, 3)
    assert "ptb.test.txt, line 3: zebra is not a word" in faults.found[1]
    (tmp_path / "ptb.test.txt").write_text("the horse\n")
    with pytest.raises(RunError, match=r"no line whose words are all in ptb.train.txt"):
        ptb.load(tmp_path, faults=Faults(skip=True))


def test_imdb_is_read_in_the_order_of_its_files_and_without_tags(tmp_path: Path) -> None:
    reviews = imdb.load(text_files.imdb(tmp_path), length=6, most=100, faults=STRICT)
    assert reviews.vocabulary.tokens[:2] == ("<pad>", "<unk>")
    assert reviews.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    shown = [reviews.vocabulary.tokens[token] for token in reviews.train.tokens[3].tolist()]
    assert shown == ["a", "wonderful", "film", "i", "loved", "it"]
    assert [reviews.vocabulary.tokens[token] for token in reviews.test.tokens[1].tolist()][:2] == ["dreadful", "don't"]


def test_a_byte_order_mark_is_no_part_of_a_word(tmp_path: Path) -> None:
    path = text_files.ptb(tmp_path) / "ptb.train.txt"
    before = ptb.load(tmp_path, faults=STRICT)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().removeprefix(b" "))
    assert ptb.load(tmp_path, faults=STRICT).vocabulary == before.vocabulary


def test_imdb_keeps_the_most_frequent_words_and_others_are_unknown(tmp_path: Path) -> None:
    reviews = imdb.load(text_files.imdb(tmp_path), length=400, most=4, faults=STRICT)
    assert len(reviews.vocabulary) == 5
    (tmp_path / "aclImdb" / "test" / "pos" / "0_9.txt").write_text("An unheard zebra i")
    again = imdb.load(tmp_path, length=400, most=4, faults=STRICT)
    assert again.test.tokens[3].tolist()[:3] == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train/pos/0_9.txt", b"caf\xe9", r"train/pos/0_9.txt, line 1, is not UTF-8 \(byte 0xe9\).*--skip-bad"),
        ("test/neg/1_2.txt", b"", r"test/neg/1_2.txt is empty"),
        ("train/neg/1_2.txt", b"... --", r"train/neg/1_2.txt has no word"),
    ],
)
def test_files_of_imdb_that_cannot_be_used_are_named_or_left_out_and_counted(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (text_files.imdb(tmp_path) / "aclImdb" / name).write_bytes(content)
    with pytest.raises(RunError, match=says):
        imdb.load(tmp_path, length=400, most=100, faults=STRICT)
    faults = Faults(skip=True)
    reviews = imdb.load(tmp_path, length=400, most=100, faults=faults)
    assert len(faults.found) == 1
    assert name in faults.found[0]
    assert len(reviews.train.labels) + len(reviews.test.labels) == 11


def test_a_part_of_imdb_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"there is no .*aclImdb/train.*: get it from https://ai.stanford"):
        imdb.load(tmp_path, length=400, most=100, faults=STRICT)
    text_files.imdb(tmp_path)
    for path in (tmp_path / "aclImdb" / "test" / "pos").iterdir():
        path.unlink()
    with pytest.raises(RunError, match=r"test/pos holds no reviews"):
        imdb.load(tmp_path, length=400, most=100, faults=Faults(skip=True))
