"""Image classifiers: a file a family, built as `build(channels=, classes=, size=)`; size: pixels a side."""
