"""The verifiable log (paper, "Updating the Trusted Binary with Verifiable Logs").

An append-only Merkle tree of released TSA binaries, as static files in C2SP formats: `merkle`
(RFC 6962), `note` (signed-note), `checkpoint` (tlog-checkpoint, tlog-cosignature), `tiles`
(tlog-tiles), `record` (one release), `folder` (the writer), `reader` (devices and auditors) and
`auditor`.
"""
