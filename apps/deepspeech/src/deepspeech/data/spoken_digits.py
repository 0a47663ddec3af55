"""Spoken digits, synthetic: one to four digits an utterance, said by espeak-ng in several voices, speeds and pitches.

No human voice is in it: what is learned here says little about people's speech. It is made once, in a folder of the
user's cache, in a minute, and is the same wherever the same release of espeak-ng makes it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random

DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
VOICES = ("en-us", "en-us+m3", "en-us+f2", "en", "en+m1", "en+f1", "en-gb-x-rp", "en-gb-x-rp+f3", "en-gb-scotland+m2", "en-029+f4")
OTHER_VOICES = ("en-us+m7", "en+f5", "en-gb-x-gbcwmd", "en-gb-scotland+f2", "en-us-nyc+m4")
SPEEDS, OTHER_SPEEDS = (120, 140, 160, 180), (130, 150, 170)
PITCHES, OTHER_PITCHES = (30, 45, 60, 75), (37, 52, 67)
