"""Users of an identity provider at a whole server: over HTTPS, with an authority of their own."""

from __future__ import annotations

import ssl
import time
from contextlib import closing
from pathlib import Path

from papaya.server.oidc import AGAIN_S
from tests.system.admin import Admin
from tests.system.processes import Installation
from tests.system.tls import Authority
from tests.unit.server.test_oidc import STRANGER, Issuer, token


def test_users_of_an_https_provider_get_their_roles(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "issuer")
    made = authority.issue("127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made.certificate, made.key)
    with closing(Issuer(tls)) as issuer, Installation(tmp_path) as installation:
        table = f'[oidc]\nissuer = "{issuer.url}"\naudience = "papaya"\n'
        roles = '[oidc.roles]\nstaff = { role = "viewer" }\nfl = { role = "operator" }\n'
        trusting = installation.add("trusting")
        with (tmp_path / "trusting.toml").open("a") as file:
            file.write(f'{table}authority = "issuer/authority.pem"\n{roles}')
        trusting.start()

        began_at = time.monotonic()

        def ask(method: str, path: str, bearer: str) -> int:
            """On a busy machine the provider may answer too late; then it is asked again."""
            admin = Admin(trusting.addresses["admin"], bearer)
            body, ends_at = b"{}" if method == "POST" else None, time.monotonic() + 4 * AGAIN_S
            while (status := admin.ask(method, path, body)[0]) == 503:
                assert time.monotonic() < ends_at, "the keys cannot be fetched"
                time.sleep(0.5)
            return status

        viewer, operator = token(issuer, groups=["staff"]), token(issuer, groups=["fl"])
        assert ask("GET", "/admin/status", viewer) == 200
        assert ask("POST", "/admin/maintenance", viewer) == 403
        assert ask("POST", "/admin/maintenance", operator) == 200
        assert ask("GET", "/admin/status", token(issuer, groups=["others"])) == 401
        assert ask("GET", "/admin/status", token(issuer, STRANGER)) == 401
        # An unknown key is looked for again, but not often.
        most = 1 + (time.monotonic() - began_at) / AGAIN_S
        assert 1 <= issuer.asked.count("/keys") <= most
        trail = Admin(trusting.addresses["admin"], installation.secret("admin.token"))
        made_by = [row["attempt"]["actor"] for row in trail.get("/admin/audit")["rows"]]
        assert "oidc:anna@example.com" in made_by
        assert trusting.stop() == 0

        doubting = installation.add("doubting")  # it trusts the authorities of the system only
        with (tmp_path / "doubting.toml").open("a") as file:
            file.write(table + roles)
        doubting.start()
        status, _ = Admin(doubting.addresses["admin"], viewer).ask("GET", "/admin/status")
        assert status == 503, "the keys cannot be fetched: this is not the user's fault"
        assert doubting.stop() == 0
