"""`papaya serve`: server processes and the TSA."""
