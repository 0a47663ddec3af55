"""Wire codecs: fewer bytes for values and indices."""
