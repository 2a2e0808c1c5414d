"""The files of the web pages, read once at the start, with the headers of their answers.

Each file has one exact path, so a request can name no other file.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "pages"

# The machine's own table of types (`mimetypes`) may be wrong, and browsers run no module of a
# wrong type.
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# A page loads from its own edge only, and runs no text as code.
_POLICY: Final = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' blob:",
    "media-src": "'self' blob:",
    "connect-src": "'self'",
    "worker-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
}

HEADERS: Final[Mapping[str, str]] = {
    # Browsers ask whether their copy is current: the names of the files stay the same.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "Permissions-Policy": "microphone=(self), camera=(self), screen-wake-lock=(self)",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of a page. `digest` changes with the content."""

    content: bytes
    zipped: bytes
    content_type: str
    digest: str


def read_folder(name: str) -> dict[str, PageFile]:
    """Return the files of a folder of the pages by their names.

    The client for JavaScript, `client`, is a folder of its own in the source tree. The wheel has it
    among the pages.
    """
    folder = FOLDER / name
    if name == "client" and not folder.is_dir():
        folder = FOLDER.parents[3] / "clients/javascript"
    return dict(_files(folder))


def file_of(content: bytes, content_type: str) -> PageFile:
    """Return a file with this content."""
    digest = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content, gzip.compress(content, mtime=0), content_type, digest)


def _files(folder: Path) -> Iterator[tuple[str, PageFile]]:
    for path in sorted(folder.iterdir()):
        if content_type := _TYPES.get(path.suffix):
            yield path.name, file_of(path.read_bytes(), content_type)
