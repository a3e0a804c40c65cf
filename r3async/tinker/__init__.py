"""A server for the Tinker API: training loops that others wrote run on a mixture of one's own, with
replayed routes."""
