"""What a token, a sample, a trajectory and a route are, and the containers they travel in. Pure."""
