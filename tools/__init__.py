"""The command-line tools: the commands, the live lines of a run, and reports."""
