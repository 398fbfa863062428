"""The dashboard: static files on the admin listener, which use the admin API.

The files hold no data and need no token. The page asks for the admin token, keeps it in the memory
of the browser's tab and sends it in the Authorization header, never in a URL. The content security
policy allows scripts, styles and requests of this listener only. So the name of a task or a reason
cannot run as a script, and nothing is loaded from other hosts.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import files

from papaya.http.exchange import Exchange, Headers
from papaya.http.routes import Buffered, HttpRoute

_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "charts.js": ("charts.js", "text/javascript; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS: Headers = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
)


def dashboard_routes() -> list[HttpRoute]:
    """The page at /dashboard/, and a redirect to it from /."""
    folder = files(__name__)
    return [
        Buffered("GET", "/", _redirect),
        Buffered("GET", "/dashboard", _redirect),
        *(
            Buffered(
                "GET",
                f"/dashboard/{path}",
                partial(_send, folder.joinpath(file).read_bytes(), content_type),
            )
            for path, (file, content_type) in _FILES.items()
        ),
    ]


def _redirect(exchange: Exchange, body: bytes) -> None:
    exchange.answer(302, headers=(("Location", "/dashboard/"),))


def _send(content: bytes, content_type: str, exchange: Exchange, body: bytes) -> None:
    exchange.answer(200, content, _HEADERS, content_type)
