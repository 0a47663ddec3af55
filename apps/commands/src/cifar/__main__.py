"""`python -m cifar` is `python -m thinwire_cifar`."""

import sys

from thinwire_cifar.__main__ import APP
from thinwire_trainer.command import main

if __name__ == "__main__":
    sys.exit(main(APP))
