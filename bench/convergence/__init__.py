"""How well models learn with each exchange, each set as the optimizer asks: `python -m bench convergence`."""
