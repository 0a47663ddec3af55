"""From the command line to checked options, before anything heavy is imported."""
