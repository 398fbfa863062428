"""The admin side of one process with a coordinator: the API's routes, and the supervisor beside it.

administration = Administration(state, ThreadedBlobs(blobs), live, clock.now, changed, server)
routes += guarded(administration.routes(), admin_token, refusal)
background.append(asyncio.create_task(administration.run()))
"""

from __future__ import annotations

from collections.abc import Callable

from papaya.config import ServerConfig
from papaya.http.routes import HttpRoute
from papaya.server.admin.history import TaskHistory
from papaya.server.admin.live import Live
from papaya.server.admin.routes import AdminRoutes
from papaya.server.admin.service import AdminService
from papaya.server.admin.stores import AdminBlobs, AdminState
from papaya.server.admin.supervisor import Supervisor


class Administration:
    """`changed` tells the coordinator of this process to look at the rows now."""

    def __init__(
        self,
        state: AdminState,
        blobs: AdminBlobs,
        live: Live,
        now: Callable[[], float],
        changed: Callable[[], None],
        server: ServerConfig,
    ) -> None:
        self.history = TaskHistory(state)
        self.service = AdminService(state, blobs, self.history, live, now, changed, server)
        self.supervisor = Supervisor(state, blobs, self.history, server, now, changed)
        self._routes = AdminRoutes(self.service)

    def routes(self) -> list[HttpRoute]:
        return self._routes.routes()

    async def run(self) -> None:
        await self.supervisor.run()
