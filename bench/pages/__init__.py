"""Figures in pages and READMEs: blocks between marks, made of the records by `hatch run results`."""
