"""`python -m trainer.plot` is `python -m thinwire_trainer.plot`."""

import sys

from thinwire_trainer.plot import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
