"""Secure aggregation (paper, "Secure Aggregation" and its appendices): what clients compute."""
