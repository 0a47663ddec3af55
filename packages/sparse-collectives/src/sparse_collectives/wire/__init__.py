"""How sparse vectors and whole gradients travel between ranks."""
