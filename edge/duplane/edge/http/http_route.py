"""A route of the edge together with what it demands of the sender of a request."""

from __future__ import annotations

from dataclasses import dataclass

from duplane.edge.access import Handler, Level, Scope


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A method and a path, their handler, and who may use them. A GET route also serves HEAD.

    A body of the route must be JSON, or a multipart form where `takes_form` is true.
    """

    method: str
    path: str
    handler: Handler
    level: Level
    scope: Scope = Scope.READ
    """The scope that an operator must have if the level is OPERATOR."""
    takes_form: bool = False
    is_page: bool = False
    """Whether this is a page that a link on another site may open."""
    is_for_operators: bool = False
    """Whether only the listener of operators has the route, also if its level is PUBLIC."""
