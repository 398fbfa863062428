"""The Coordinator: assigns tasks to aggregators and clients to tasks (paper, "System Components")."""
