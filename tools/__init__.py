"""The command-line tools: the commands, the live view of a run, and reports."""
