"""HTTP/1.1: a strict server endpoint, and connections between servers.

Bodies are received straight into their final buffer (docs/adr/0012-own-http-endpoint.md). Not
supported: chunked encoding, other versions of HTTP, percent-decoding, redirects, cookies.

    listener, acceptor, proxy_protocol                listening, and limits on connections
    server_connection, connection_state               the server's side of a connection
    pool, client_connection                           requests to other servers
    relay                                             passing a body on while it arrives
    passthrough, client_hello, lookups                passing TLS through without decrypting it
    head, exchange, ranges, routes, limits, errors,
    sockets                                           shared by both
"""
