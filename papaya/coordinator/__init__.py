"""The Coordinator: tasks to aggregators, clients to tasks (paper, "System Components")."""
