"""The rules by which ranks agree on partial rounds: events in, actions out; no clock, thread or I/O."""
