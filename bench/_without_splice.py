"""The peer of `splice_relay.py`: `papaya` with the splice relay turned off."""

from __future__ import annotations

import papaya.http.pool
import papaya.http.server_connection
from papaya.cli.main import main

if __name__ == "__main__":
    papaya.http.pool.open_pipe = lambda: None  # type: ignore[attr-defined]
    papaya.http.server_connection.plain_socket = lambda _: -1  # type: ignore[attr-defined]
    main()
