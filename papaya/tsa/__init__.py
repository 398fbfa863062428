"""The TSA (paper, "Secure Aggregation"), and what talks to it.

`enclave.toml` lists what runs inside the enclave.
"""
