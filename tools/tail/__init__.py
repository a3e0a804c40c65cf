"""Views of a run while it trains: on a terminal, in a pipe, on another machine, and the progress
line of `train`."""
