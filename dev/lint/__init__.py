"""Rules of the repository that no other linter knows."""
