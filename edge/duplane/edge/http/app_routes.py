"""The paths about apps: which kinds of session are served, and switching them."""

from __future__ import annotations

import logging

from aiohttp import web

from duplane.edge.apps import Apps, UnservedAppError
from duplane.edge.http.messages import json_answer, read_body, read_object
from duplane.edge.http.operators import RequireOperator

_log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 4 * 1024


class AppAnswers:
    """`body_s` is how long a request's body may take."""

    def __init__(self, apps: Apps, require_operator: RequireOperator, body_s: float) -> None:
        self._apps = apps
        self._require_operator = require_operator
        self._body_s = body_s

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/api/apps", self._list),
            web.get("/api/admin/apps", self._full_list),
            web.put("/api/admin/apps/{app}", self._switch),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        return json_answer(self._apps.public_list())

    async def _full_list(self, request: web.Request) -> web.Response:
        self._require_operator(request)
        return json_answer(self._apps.full_list())

    async def _switch(self, request: web.Request) -> web.Response:
        """Switch one app; the sessions that run go on."""
        self._require_operator(request)
        app_id = request.match_info["app"]
        told = read_object(await read_body(request, _MAX_BODY_BYTES, self._body_s))
        is_on = told.get("enabled")
        if not isinstance(is_on, bool):
            raise web.HTTPUnprocessableEntity(text="enabled: must be true or false")
        try:
            app = self._apps.switch(app_id, is_on=is_on)
        except KeyError:
            raise web.HTTPNotFound(text=f"Unknown app: {app_id}") from None
        except UnservedAppError as error:
            raise web.HTTPConflict(text=f"{error} is not served here") from None
        _log.info("app %s is switched %s", app_id, "on" if is_on else "off")
        return json_answer({"success": True, "app": app})
