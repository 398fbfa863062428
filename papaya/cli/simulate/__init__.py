"""`papaya simulate`: runs of a simulated fleet."""
