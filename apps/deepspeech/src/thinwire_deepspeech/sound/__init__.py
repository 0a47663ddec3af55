"""From files to what the model hears."""
