"""`papaya task`: commands for the owner of a model."""
