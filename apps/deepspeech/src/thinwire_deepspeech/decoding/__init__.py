"""From the model's probabilities to text."""
