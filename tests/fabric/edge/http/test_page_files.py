"""The files of the web pages, as a browser gets them."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping

import aiohttp
import pytest
from support.edge.live_edge import LiveEdge, live_edge

from duplane.edge.http.page_files import FOLDER

TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:;"
    " media-src 'self' blob:; connect-src 'self'; worker-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
ADDRESS = re.compile(r'(?:href|src)="([^"]*)"|(?:from|import) "([^"]*)"')


async def ask(
    edge: LiveEdge, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], bytes]:
    address = f"http://{edge.edge.address}{path}"
    headers = {"Accept-Encoding": "identity", **(headers or {})}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as client,
        client.request(method, address, headers=headers) as answer,
    ):
        return answer.status, answer.headers, await answer.read()


def page_paths(edge: LiveEdge) -> list[str]:
    paths = [route.path for route in edge.edge.routes if route.path.startswith("/pages/")]
    return ["/", "/operator", *paths]


async def test_each_file_has_its_type_the_policy_and_one_connection() -> None:
    async with live_edge() as edge:
        for path in page_paths(edge):
            code, headers, content = await ask(edge, path)
            kind = path.rpartition(".")[2] if "." in path else "html"
            assert code == 200
            assert headers["Content-Type"].partition(";")[0] == TYPES[kind], path
            assert headers["Content-Security-Policy"] == POLICY
            assert headers["Permissions-Policy"].startswith("microphone=(self), camera=(self)")
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
            assert headers["Cache-Control"] == "no-cache"
            assert headers["Connection"] == "close"
            zipped = await ask(edge, path, headers={"Accept-Encoding": "br, gzip"})
            assert zipped[1]["Content-Encoding"] == "gzip"
            assert gzip.decompress(zipped[2]) == content
            assert zipped[1]["ETag"] == headers["ETag"]


async def test_browser_that_has_a_file_gets_it_only_after_a_change() -> None:
    async with live_edge() as edge:
        _, headers, content = await ask(edge, "/")
        known = {"If-None-Match": headers["ETag"]}
        code, again, body = await ask(edge, "/", headers=known)
        assert (code, body) == (304, b"")
        assert again["ETag"] == headers["ETag"]
        assert again["Content-Security-Policy"] == POLICY
        code, _, body = await ask(edge, "/", headers={"If-None-Match": 'W/"another"'})
        assert (code, body) == (200, content)
        code, head, body = await ask(edge, "/", method="HEAD")
        assert (code, body) == (200, b"")
        assert int(head["Content-Length"]) == len(content)


@pytest.mark.parametrize(
    "path",
    [
        "/pages/",
        "/pages/talk/",
        "/pages/talk/nothing.js",
        "/pages/talk/index.html",
        "/pages/client/package.json",
        "/pages/client/test/replay.mjs",
        "/pages/talk/..%2f..%2fserver.py",
        "/pages/talk/%2e%2e/%2e%2e/server.py",
        "/index.html",
    ],
)
async def test_no_other_path_has_a_file(path: str) -> None:
    async with live_edge() as edge:
        code, headers, _ = await ask(edge, path)
        assert code == 404
        assert "Content-Security-Policy" not in headers


async def test_pages_can_be_switched_off() -> None:
    async with live_edge(pages="off") as edge:
        assert page_paths(edge) == ["/", "/operator"]
        for path in ("/", "/operator", "/pages/client/index.js"):
            assert (await ask(edge, path))[0] == 404


async def test_pages_load_only_files_that_exist() -> None:
    async with live_edge() as edge:
        served = {*page_paths(edge)}
        for path in served:
            content = (await ask(edge, path))[2].decode()
            for groups in ADDRESS.findall(content):
                address = "".join(groups)
                if address.startswith("./"):
                    address = f"{path.rpartition('/')[0]}/{address[2:]}"
                if address.startswith("/"):
                    assert address in served, f"{path} names {address}"


def test_page_of_the_talk_is_small() -> None:
    files = [path for path in (FOLDER / "talk").iterdir() if path.suffix != ".md"]
    client = FOLDER.parents[3] / "clients/javascript"
    files += [path for path in client.glob("*.js") if path.name != "index.js"]
    assert len(files) <= 16
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < 40_000
