"""`python -m text` is `python -m thinwire_text`."""

import sys

from thinwire_text.__main__ import APP
from thinwire_trainer.command import main

if __name__ == "__main__":
    sys.exit(main(APP))
