"""DeepSpeech2 and its parts."""
