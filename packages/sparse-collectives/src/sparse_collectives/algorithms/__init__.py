"""One file an algorithm, what they share beside them, and the table of their names."""
