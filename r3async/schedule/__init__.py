"""Scheduling between generators and the learner: leases, tasks, waiting groups,
validation and health."""
