"""The routes of the web pages."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Final

from aiohttp import ETag, hdrs, web

from duplane.edge.access import Level
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import closing
from duplane.edge.http.page_files import HEADERS, PageFile, file_of, read_folder

INDEX: Final = "index.html"


class PageRoutes:
    """Serves the pages, and the modules that they load, to everybody: they hold no secret.

    Whatever a page then asks for needs the credential that any client needs.
    """

    def routes(self) -> list[HttpRoute]:
        """Return the routes. Reads the files."""
        return [
            *_folder("talk", "/"),
            *_folder("client"),
            *_folder("operator", "/operator", is_for_operators=True),
        ]


def _folder(name: str, page: str = "", *, is_for_operators: bool = False) -> list[HttpRoute]:
    """Return the routes of a folder, with its page at the path `page`."""
    return [
        HttpRoute(
            "GET",
            page if file_name == INDEX else f"/pages/{name}/{file_name}",
            _Answer(file).handle,
            Level.PUBLIC,
            is_page=file_name == INDEX,
            is_for_operators=is_for_operators,
        )
        for file_name, file in read_folder(name).items()
    ]


def ca_route(path: Path) -> HttpRoute:
    """Return the route of the certificate of a CA, which phones install."""
    file = file_of(path.read_bytes(), "application/x-x509-ca-cert")
    return HttpRoute("GET", "/ca.pem", _Answer(file).handle, Level.PUBLIC, is_page=True)


class _Answer:
    """Answers requests for one file."""

    def __init__(self, file: PageFile) -> None:
        self._file = file
        # It is weak because the compressed answer has the same one.
        self._tag = ETag(file.digest, is_weak=True)

    async def handle(self, request: web.Request) -> web.Response:
        """Return the file, or 304 if the browser has it."""
        known = request.if_none_match or ()
        if any(tag.value in (self._file.digest, "*") for tag in known):
            answer = web.Response(status=HTTPStatus.NOT_MODIFIED, headers=HEADERS)
        else:
            answer = self._content(request)
        answer.etag = self._tag
        return closing(answer)

    def _content(self, request: web.Request) -> web.Response:
        headers = {**HEADERS, hdrs.CONTENT_TYPE: self._file.content_type}
        if "gzip" not in request.headers.get(hdrs.ACCEPT_ENCODING, "").lower():
            return web.Response(body=self._file.content, headers=headers)
        headers[hdrs.CONTENT_ENCODING] = "gzip"
        return web.Response(body=self._file.zipped, headers=headers)
