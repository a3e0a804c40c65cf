"""Events, metrics and reports."""
