"""Front door of thinwire: which way to train over your network, and whether this installation can."""

from thinwire.advice.measuring import NoAdvice
from thinwire.advice.plan import Plan, advise
from thinwire.version import __version__

__all__ = ["NoAdvice", "Plan", "__version__", "advise"]
