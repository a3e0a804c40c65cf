"""Publishing, delivery and verification of weights."""
