"""The apps: the pages of the reference server. Operators can switch each one on or off.

These switches are kept only in memory. When the process starts, each app is on.
"""

from __future__ import annotations

from dataclasses import dataclass

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class App:
    """One page of the reference server; `request_type` is the kind of session that it uses."""

    app_id: str
    name: str
    route: str
    request_type: str


_APPS = (
    App("turnbased", "Turn-based Chat", "/turnbased", "chat"),
    App("half_duplex_audio", "Half-Duplex Audio", "/half_duplex", "half_duplex_audio"),
    App("omni", "Omni Full-Duplex", "/omni", "omni_duplex"),
    App("audio_duplex", "Audio Full-Duplex", "/audio_duplex", "audio_duplex"),
)


class Apps:
    """The state of each app. While an app is off, sessions of its kind cannot begin."""

    def __init__(self) -> None:
        self._is_on = dict.fromkeys((app.app_id for app in _APPS), True)

    def refusal(self, request_type: str) -> str | None:
        """Return why no session of this kind may begin now; None if sessions may begin."""
        for app in _APPS:
            if app.request_type == request_type and not self._is_on[app.app_id]:
                return f"{app.name} is currently disabled"
        return None

    def switch(self, app_id: str, *, is_on: bool) -> Json:
        """Switch an app on or off; return its row. Raises KeyError."""
        app = next((app for app in _APPS if app.app_id == app_id), None)
        if app is None:
            raise KeyError(app_id)
        self._is_on[app_id] = is_on
        return self._row(app)

    def public_list(self) -> Json:
        """Return the apps that are on."""
        on = (app for app in _APPS if self._is_on[app.app_id])
        return {"apps": [_public_row(app) for app in on]}

    def full_list(self) -> Json:
        """Return every app, with `enabled`."""
        return {"apps": [self._row(app) for app in _APPS]}

    def _row(self, app: App) -> Json:
        return {**_public_row(app), "enabled": self._is_on[app.app_id]}


def _public_row(app: App) -> Json:
    return {"app_id": app.app_id, "name": app.name, "route": app.route}
