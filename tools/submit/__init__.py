"""`r3async submit` and `r3async cluster`: a run as a job of a Ray cluster."""
