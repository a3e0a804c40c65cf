"""Run training as a job of a Ray cluster: `r3async submit`."""
