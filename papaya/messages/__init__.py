"""What the parts say to each other: one module per conversation, drawn at its top."""
