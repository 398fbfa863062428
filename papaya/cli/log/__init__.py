"""`papaya log`: the verifiable log of TSA binaries."""
