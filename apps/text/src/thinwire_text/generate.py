"""`python -m thinwire_text generate RUN --prompt …`: goes on with a text, by a trained model."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from thinwire_trainer.app import App
from thinwire_trainer.command_line import quantities
from thinwire_trainer.command_line.parser import Parser
from thinwire_trainer.errors import RunError
from thinwire_trainer.trained import trained
from torch import Tensor, nn

from thinwire_text.catalogue import SENTIMENT
from thinwire_text.data.corpus import END, UNKNOWN, Vocabulary, words
from thinwire_text.language import built
from thinwire_text.models.language import Language

NO_SPACE_BEFORE = re.compile(r" ([.,;:!?)\]}’'])")
NO_SPACE_AFTER = re.compile(r"([(\[{‘']) ")


def main(app: App, argv: Sequence[str]) -> int:
    """Prints prompt and continuation."""
    parser = Parser(prog=f"{app.module} generate", usage="python -m %(prog)s RUN [--prompt TEXT] [flags]")
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder that --output named")
    add("--prompt", default="", metavar="TEXT", help="what it begins with (default: a new paragraph)")
    add("--length", type=quantities.count, default=60, metavar="T", help="tokens to add (default: 60)")
    add(
        "--temperature",
        type=quantities.non_negative,
        default=0.8,
        metavar="τ",
        help="below 1 likelier tokens are preferred; 0: always the likeliest (default: 0.8)",
    )
    add("--seed", type=quantities.seed, default=0, help="default: 0")
    given = parser.parse_args(argv)
    run = trained(app, given.run)
    if run.options.dnn in SENTIMENT:
        raise RunError(f"{given.run} holds a classifier ({run.options.dnn}): python -m {app.module} classify")
    vocabulary = Vocabulary(tuple(run.kept["tokens"]))
    model = run.into(built(run.options.dnn, len(vocabulary), run.options.app))
    prompt = _encoded(given.prompt, vocabulary, by_spaces=run.options.dataset == "ptb")
    generator = torch.Generator().manual_seed(given.seed)
    added = continued(
        model,
        prompt,
        length=given.length,
        window=run.options.app["window"],
        temperature=given.temperature,
        generator=generator,
        never=vocabulary.numbers.get(UNKNOWN),
    )
    print(shown([*prompt[1:], *added], vocabulary))
    return 0


@torch.no_grad()
def continued(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    length: int,
    window: int,
    temperature: float,
    generator: torch.Generator,
    never: int | None = None,
) -> list[int]:
    """`length` tokens that follow the prompt, drawn from softmax(logits / temperature); 0: the likeliest.

    never: a token that is not drawn. A model that carries nothing sees the last `window` tokens.
    """
    read = list(prompt)
    state = cast(Language, model).begin(1)
    fresh = read
    while len(read) < len(prompt) + length:
        given = fresh if state else read[-window:]
        logits, state = model(torch.tensor(given)[:, None], state)
        fresh = [_drawn(logits[-1, 0].double(), temperature, generator, never)]
        read += fresh
    return read[len(prompt) :]


def _drawn(logits: Tensor, temperature: float, generator: torch.Generator, never: int | None) -> int:
    if never is not None:
        logits[never] = -torch.inf
    if temperature == 0:
        return int(logits.argmax())
    below = logits - logits.max()  # 0 or less: so that nothing but -inf comes of the least temperature
    return int(torch.multinomial((below / temperature).softmax(0), 1, generator=generator))


def _encoded(prompt: str, vocabulary: Vocabulary, *, by_spaces: bool) -> list[int]:
    """Numbers of the prompt, after an <eos>; RunError for an unknown word, if the vocabulary has no <unk>."""
    try:
        return cast(list[int], vocabulary.encode([END, *(prompt.split() if by_spaces else words(prompt))]).tolist())
    except KeyError:
        raise RunError(f"--prompt {prompt!r} has words that training has not, and it has no {UNKNOWN}") from None


def shown(tokens: Sequence[int], vocabulary: Vocabulary) -> str:
    """Text of the tokens: paragraphs end where the model ends them, and signs stand at their words."""
    text = " ".join("\n\n" if vocabulary.tokens[token] == END else vocabulary.tokens[token] for token in tokens)
    text = NO_SPACE_AFTER.sub(r"\1", NO_SPACE_BEFORE.sub(r"\1", text))
    return re.sub(r" *\n\n *", "\n\n", text).strip()
