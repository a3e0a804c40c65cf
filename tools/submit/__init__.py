"""Run training as a job of a Ray cluster: `r3async submit` and `r3async cluster`."""
