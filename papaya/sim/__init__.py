"""The simulator: the very machines of production, under virtual time, a seed and faults."""
