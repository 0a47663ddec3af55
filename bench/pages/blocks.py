"""Every block that a page may mark, by name."""

from __future__ import annotations

from bench.pages import advice, compression, learnt, partial, steps
from bench.pages.marked import Blocks

BLOCKS: Blocks = {
    "adam-beta1": learnt.adam_beta1,
    "adam-farther": learnt.adam_farther,
    "adam-under-ddp": learnt.adam_under_ddp,
    "advice": advice.advice("1gbit"),
    "advice-elsewhere": advice.advice("100gbit", "wan", whole=False),
    "bytes": compression.codec_bytes,
    "calls": steps.calls,
    "cluster": partial.cluster,
    "convergence": learnt.written("convergence"),
    "demo-seeds": learnt.demo_seeds,
    "eager": partial.eager,
    "eager-speech": partial.eager_speech,
    "few-entries": learnt.few_entries,
    "first-figure": steps.first_figure,
    "gpu": compression.gpu_speed,
    "learning": learnt.written("learning"),
    "learning-averaging": learnt.written("learning-averaging"),
    "learning-pydoc": learnt.written("learning-pydoc"),
    "periodic-averaging": learnt.periodic_averaging,
    "predictions": steps.predictions,
    "settings": learnt.settings,
    "speed": compression.speed,
}
