"""A run while it trains: on a terminal, in a pipe, on another machine, and the line that `train` shows."""
