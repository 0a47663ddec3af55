"""`python -m deepspeech` is `python -m thinwire_deepspeech`."""

import sys

from thinwire_deepspeech.__main__ import APP
from thinwire_trainer.command import main

if __name__ == "__main__":
    sys.exit(main(APP))
