"""The likeliest labels over all paths that say them: CTC prefix beam search, without a language model."""

from collections import defaultdict
from functools import partial

import numpy as np

from thinwire_deepspeech.decoding.alphabet import BLANK
from thinwire_deepspeech.decoding.greedy import LogProbabilities, greedy
from thinwire_deepspeech.decoding.paths import log_probability

Prefix = tuple[int, ...]
NEVER = -np.inf


def beam_search(log_probabilities: LogProbabilities, *, width: int) -> list[int]:
    """The likeliest of the best `width` prefixes after the last frame, and of what `greedy` finds.

    Hannun et al. 2014, without the language model. The finalists are weighed over all their paths, also those that the
    search has cut: so more beams can lose a candidate, but the result is never less likely than the greedy one.
    """
    finalists: list[Prefix] = [tuple(greedy(log_probabilities)), *_search(log_probabilities, width)]
    return list(max(dict.fromkeys(finalists), key=partial(log_probability, log_probabilities)))


def _search(log_probabilities: LogProbabilities, width: int) -> list[Prefix]:
    """The best prefixes by the probability of the paths that were kept, which end in a blank or in their last label."""
    beams: dict[Prefix, tuple[float, float]] = {
        (): (0.0, NEVER)
    }  # log P of paths that end in (a blank, the last label)
    for frame in log_probabilities.tolist():
        grown: defaultdict[Prefix, list[float]] = defaultdict(lambda: [NEVER, NEVER])
        for prefix, (blank, label) in beams.items():
            either, last = _sum(blank, label), prefix[-1] if prefix else None
            for symbol, chance in enumerate(frame):
                if symbol == BLANK:
                    _add(grown[prefix], 0, either + chance)
                elif symbol == last:
                    _add(grown[prefix], 1, label + chance)
                    _add(grown[*prefix, symbol], 1, blank + chance)
                else:
                    _add(grown[*prefix, symbol], 1, either + chance)
        best = sorted(grown, key=lambda prefix: (-_sum(*grown[prefix]), prefix))[:width]
        beams = {prefix: (grown[prefix][0], grown[prefix][1]) for prefix in best}
    return list(beams)


def _add(beam: list[float], part: int, value: float) -> None:
    beam[part] = _sum(beam[part], value)


def _sum(a: float, b: float) -> float:
    """log(eᵃ + eᵇ)"""
    return float(np.logaddexp(a, b))
