"""The messages of the protocol: one module per conversation, drawn at its top."""
