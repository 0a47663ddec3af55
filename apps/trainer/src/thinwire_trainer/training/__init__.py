"""The loop and what it works on."""
