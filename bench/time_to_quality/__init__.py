"""How soon a model is good behind a slow link, whichever way its ranks exchange: `python -m bench time-to-quality`."""
