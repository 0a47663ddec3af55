"""Labelled images: a file a data set, read from `--data-dir`; what is damaged is named, never run."""
