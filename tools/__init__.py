"""What a person runs: the command line, the live view, reports, and the installer."""
