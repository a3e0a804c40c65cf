"""What a person runs: the command line, the live view, and reports."""
