"""GET /v1/models: the names of the models that a client can ask for, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus

from aiohttp import web

from duplane.edge.access import Level
from duplane.edge.http.fabric_routes import list_workers
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import Json, json_answer
from duplane.edge.http.openai_answers import refusal_body
from duplane.edge.http.status import is_lost
from duplane.fabric.client import FabricClient
from duplane.fabric.v1 import admin_pb2

PATH = "/v1/models"
_LABEL = "model"
_OWNER = "duplane"


class ModelRoutes:
    """Serves the models of the workers that sessions of this edge can get."""

    def __init__(self, fabric: FabricClient, pool: str, needs: Mapping[str, str]) -> None:
        self._fabric = fabric
        self._pool = pool
        self._needs = needs
        # The name that a client asks for replaces the model that the edge needs.
        self._needs_of_names = {name: needs[name] for name in needs if name != _LABEL}

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        return [
            HttpRoute("GET", PATH, self._list, Level.CLIENT),
            # Many clients do not encode a slash in the name.
            HttpRoute("GET", f"{PATH}/{{model:.+}}", self._one, Level.CLIENT),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        workers = (await list_workers(self._fabric)).workers
        names = model_names(workers, self._pool, self._needs_of_names)
        return json_answer({"object": "list", "data": [_model(name) for name in names]})

    async def _one(self, request: web.Request) -> web.Response:
        """Answer with the model that a session gets which asks for this name."""
        asked = request.match_info["model"]
        workers = (await list_workers(self._fabric)).workers
        if asked in model_names(workers, self._pool, self._needs_of_names):
            return json_answer(_model(asked))
        match model_names(workers, self._pool, self._needs):
            case [name]:  # any name gets the only model
                return json_answer(_model(name))
            case names:
                served = ", ".join(names) or "none"
        message = f"no worker serves the model {asked!r}; served are: {served}"
        body = refusal_body(HTTPStatus.NOT_FOUND, message, code="model_not_found", param="model")
        return json_answer(body, HTTPStatus.NOT_FOUND)


def model_names(
    workers: Iterable[admin_pb2.WorkerStatus], pool: str, needs: Mapping[str, str]
) -> Sequence[str]:
    """Return the distinct models of the attached workers of a pool that meet `needs`, sorted.

    A worker's label `model` is the name by which clients can ask for its model. Only if no worker
    has this label, the names in the descriptions of the models count: any name gets such a worker.
    """
    found = [
        worker.worker
        for worker in workers
        if not is_lost(worker)
        and worker.worker.pool == pool
        and needs.items() <= dict(worker.worker.labels).items()
    ]
    labels = {worker.labels[_LABEL] for worker in found if _LABEL in worker.labels}
    return sorted(labels or {worker.model.name for worker in found if worker.model.name})


def _model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": _OWNER}
