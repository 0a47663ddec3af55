"""One file a family of models."""
