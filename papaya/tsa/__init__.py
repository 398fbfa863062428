"""The trusted party (paper, "Secure Aggregation"): all that runs inside the enclave, no more."""
