"""Groups that wait for the learner."""
