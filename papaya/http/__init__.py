"""HTTP/1.1 as Papaya speaks it: a strict server endpoint, and connections between servers.

Bodies are received straight into the buffer where they belong (DESIGN, "Wire"). What is not here:
chunked encoding, other versions of HTTP, percent-decoding, ranges, redirects, cookies.
"""
