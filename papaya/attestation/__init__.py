"""Remote attestation, the device's side (paper, "Deployment with Intel SGX").

`policy` is what the device's owner wants, `verify` checks a TSA against it before
anything is masked, `software` is a platform that proves nothing and says so.
"""
