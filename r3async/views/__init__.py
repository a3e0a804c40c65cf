"""Views of a run for people: the report, the live view, and the readers of a run's files."""
