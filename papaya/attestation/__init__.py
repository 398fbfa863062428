"""Remote attestation, the device's side (paper, "Deployment with Intel SGX").

`policy` is set by the device's owner; `verify` checks a TSA against it before anything is masked;
`software` is a simulated platform for demonstrations, without security.
"""
