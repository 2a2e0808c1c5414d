"""Rate limits of clients: units sent to the worker, CPU time of input, requests, logins. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict

_BURST_S = 5.0  # seconds of units that a client may send in one burst, as after a network delay
_BURST_WORK_S = 0.05  # CPU seconds of one long message, for example with a voice or a chat history
_FAILED_LOGINS_PER_MINUTE = 10.0
_MAX_NETWORKS = 10_000
_ROUNDING_S = 1e-6  # a sum of intervals may exceed the burst by this much


class RateLimit:
    """Limits an amount per second; allows a bounded burst (the generic cell rate algorithm)."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst_s = burst / per_s
        self._used_until_s = -math.inf

    def spend(self, now_s: float, amount: float = 1.0) -> float:
        """Count an amount at `now_s`; return the seconds to wait before the next call."""
        used_until_s = max(self._used_until_s, now_s) + amount / self._per_s
        self._used_until_s = used_until_s
        return max(0.0, used_until_s - self._burst_s - now_s)


def unit_rate(units_per_s: float, unit_s: float) -> RateLimit:
    """Return the limit of units that one session sends to its worker.

    `units_per_s` is the limit for units of one second. More of them may be sent if a unit lasts
    only `unit_s`, so that the limit of sound is the same.
    """
    per_s = units_per_s / unit_s
    return RateLimit(per_s, max(_BURST_S * per_s - 1, 0.0))


def cpu_quota(share: float) -> RateLimit:
    """Return the limit of CPU time for one client's input. `share` is a share of one core."""
    return RateLimit(share, _BURST_WORK_S)


class NetworkRates:
    """Limits events per network, with a bounded burst: one bucket of tokens for each.

    At most `_MAX_NETWORKS` networks are remembered. Beyond that, the network whose last event is
    the oldest is forgotten, and may cause a whole burst again.
    """

    def __init__(self, per_s: float, burst: float) -> None:
        self._interval_s = 1 / per_s
        self._burst_s = burst / per_s
        self._used_until_s: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, network: str, now_s: float) -> float:
        """Return the seconds until the network may cause an event; 0 if it may now."""
        used_until_s = max(self._used_until_s.get(network, now_s), now_s)
        wait_s = used_until_s + self._interval_s - self._burst_s - now_s
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def spend(self, network: str, now_s: float) -> float:
        """Count an event and return 0; or count nothing and return the seconds to wait."""
        if wait_s := self.wait_s(network, now_s):
            return wait_s
        used_until_s = max(self._used_until_s.pop(network, now_s), now_s)
        self._used_until_s[network] = used_until_s + self._interval_s
        if len(self._used_until_s) > _MAX_NETWORKS:
            self._used_until_s.popitem(last=False)
        return 0.0


def request_rates(per_s: float) -> NetworkRates:
    """Return the limit of requests and opened WebSockets per network."""
    return NetworkRates(per_s, max(1.0, _BURST_S * per_s))


def failed_logins() -> NetworkRates:
    """Return the limit of failed logins: ten a minute and network.

    The network of a client is `ClientAddress.network`. `wait_s` says before a login whether it may
    be tried, and `spend` counts a failed one.
    """
    return NetworkRates(_FAILED_LOGINS_PER_MINUTE / 60.0, _FAILED_LOGINS_PER_MINUTE)
