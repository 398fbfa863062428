"""The admin API for owners and operators, and the supervisor of tasks."""
