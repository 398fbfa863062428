"""For the model's owner and the operator: the admin API, and the supervisor of tasks' lives."""
