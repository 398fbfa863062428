"""`papaya demo`: the real system on one machine, for a minute."""
