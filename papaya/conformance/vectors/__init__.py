"""Test vectors of every format that a client reads or writes."""
