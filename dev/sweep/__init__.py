"""Make the runs of a plan file (variants, seeds, initial models) and compare them:
`python -m dev sweep`."""
