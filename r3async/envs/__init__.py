"""Games and tasks that a policy plays."""
