"""Compression: ranks exchange the change since the last agreed model, rounded or sparse, with error feedback."""
