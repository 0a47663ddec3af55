"""The command line, parsed into checked options before anything heavy is imported."""
