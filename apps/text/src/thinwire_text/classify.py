"""`python -m thinwire_text classify RUN SENTENCE …`: praise or blame, by a trained model."""

from collections.abc import Sequence
from pathlib import Path

import torch
from thinwire_trainer.app import App
from thinwire_trainer.command_line.parser import Parser
from thinwire_trainer.errors import RunError
from thinwire_trainer.trained import trained

from thinwire_text.catalogue import LANGUAGE
from thinwire_text.data.corpus import Vocabulary
from thinwire_text.data.imdb import words
from thinwire_text.sentiment import built, padded


@torch.no_grad()
def main(app: App, argv: Sequence[str]) -> int:
    """Prints a line a sentence: pos or neg, with its probability."""
    parser = Parser(prog=f"{app.module} classify", usage="python -m %(prog)s RUN SENTENCE …")
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder that --output named")
    parser.add_argument("sentences", nargs="+", metavar="SENTENCE")
    given = parser.parse_args(argv)
    run = trained(app, given.run)
    if run.options.dnn in LANGUAGE:
        raise RunError(f"{given.run} holds a language model ({run.options.dnn}): python -m {app.module} generate")
    vocabulary = Vocabulary(tuple(run.kept["tokens"]))
    model = run.into(built(run.options.dnn, len(vocabulary), run.options.app))
    read = [words(sentence)[: run.options.app["length"]] for sentence in given.sentences]
    if [] in read:
        raise RunError(f"{given.sentences[read.index([])]!r} has no word")
    praise = model(*padded([vocabulary.encode(tokens) for tokens in read])).softmax(1)[:, 1].tolist()
    for sentence, probability in zip(given.sentences, praise, strict=True):
        side, share = ("pos", probability) if probability >= 0.5 else ("neg", 1 - probability)
        print(f"{side}  {share:.2f}  {sentence}")
    return 0
