"""The simulator: the very machines that run in production, under virtual time, a seed and faults."""
