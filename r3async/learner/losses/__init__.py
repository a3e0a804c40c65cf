"""Advantages, policy losses, KL estimators and the trust region."""
