"""Fewer bytes: what is exchanged is the change since the last agreed model, rounded or sparse, with error feedback."""
