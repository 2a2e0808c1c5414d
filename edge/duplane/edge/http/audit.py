"""The audit log: one line for each action of an operator, with who, what and the result."""

from __future__ import annotations

import logging

from aiohttp import web

from duplane.edge.access import Caller, client_address, quoted
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.transport.client_address import AddressForm
from duplane.fabric.monitoring.logs import AUDIT

_log = logging.getLogger(AUDIT)


def log_action(
    request: web.Request, route: HttpRoute, caller: Caller, status: int, form: AddressForm
) -> None:
    """Log an action, with the client's address in this form.

    The line has fields as NAME=VALUE, no query, and nothing of the body.
    """
    names = {name: quoted(value) for name, value in request.match_info.items()}
    who = {
        "kind": caller.kind.name.lower(),
        "credential": quoted(caller.credential),
        "tenant": quoted(caller.tenant),
        "address": client_address(request).logged(form),
    }
    what = {"method": request.method, "route": route.path, **names, "status": status}
    fields = {**who, **what}
    _log.info("%s", " ".join(f"{name}={value}" for name, value in fields.items()))
