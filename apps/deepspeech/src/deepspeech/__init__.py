"""Speech recognition with every synchronisation algorithm; see `python -m deepspeech --help`."""
