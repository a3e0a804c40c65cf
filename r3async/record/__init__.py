"""Records of a run: events, metrics, the timeline, routes, recordings, and copies
of them elsewhere."""
