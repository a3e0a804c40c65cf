"""What shows a run to a person: the report, the live view, and the readers of a run's files."""
