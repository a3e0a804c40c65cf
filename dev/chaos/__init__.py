"""`python -m dev chaos`: a real run whose processes are killed and whose messages are delayed and damaged, and its accounting."""
