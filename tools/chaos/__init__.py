"""`r3async chaos`: a real run whose processes are killed and whose messages are held up and damaged, and its books."""
