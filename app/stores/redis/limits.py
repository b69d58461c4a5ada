"""Limits on Redis: lua/limits.lua decides; this module builds its input and turns its answers into errors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

import redis

from app.domain.limits import UNCHARGED, Charge, Limits, Payer, Used
from app.errors import BudgetSpent, LimitReached, TooManyRequests
from app.settings import EngineSettings
from app.stores.redis import keys
from app.stores.redis.client import Scripts, flat, texts
from app.stores.redis.types import Record

_LIMITED = b"limited"
_TEXTS = {
    "requests_per_s": "{payer} made {used:.3g} calls a second, and its requests_per_s is {limit:g}",
    "tokens_per_s": "{payer} sent {used:.3g} tokens a second, and its tokens_per_s is {limit:g}",
    "concurrent_samples": "{payer} has {used:.0f} sequences that wait or are sampled, and its concurrent_samples is "
    "{limit:.0f}",
    "live_models": "{payer} has {used:.0f} live models, and its live_models is {limit:.0f}: finish a session, or "
    "delete a run",
    "live_sessions": "{payer} has {used:.0f} sessions that have not ended, and its live_sessions is {limit:.0f}: "
    "finish one, or wait until the silent ones expire",
    "storage_bytes": "{payer} has {used:.0f} bytes of checkpoints, and its storage_bytes is {limit:.0f}: delete some",
    "monthly_budget": "{payer} has spent {used:.6g} US dollars this month, and its monthly_budget is {limit:.6g}: it "
    "can train and sample again in the next month (UTC), or when the operator raises the budget; saving and reading "
    "still work",
}
_FINAL: dict[str, type[LimitReached]] = {
    "live_models": LimitReached,
    "live_sessions": LimitReached,
    "storage_bytes": LimitReached,
    "monthly_budget": BudgetSpent,
}
"""The errors for limits that waiting a few seconds does not help."""
_SEEN = "GET /api/v1/limits shows the limits and their use"


class RedisQuotas:
    """The limits of projects and keys, and their use. A journalled call is charged as it is admitted
    (RedisOpLog.admit)."""

    def __init__(self, client: redis.Redis, settings: EngineSettings) -> None:
        self._redis = client
        self._run = Scripts(client, settings)

    def take(self, charge: Charge) -> None:
        """Charges all payers of a call, or none. Raises TooManyRequests if the call may be repeated later, and
        LimitReached if something has to be deleted first."""
        if asked := encoded(charge):
            check(self._run("take", asked))

    def reserve(self, path: str, charge: Charge, seconds: float, upload: tuple[str, Record] | None = None) -> None:
        """Charges as `take` does, and reserves room for the checkpoint at `path`, of the charge's `stored` bytes: they
        count from now on, until RedisRecords.put_reserved records the checkpoint, `release`, or the end of `seconds`.
        An earlier reservation for this path is replaced; if the charge is refused, that one stays.

        `upload`: the id and the fields of an upload to record in the same step. Where it exists already, this changes
        and charges nothing."""
        asked, payers = encoded_with_payers(charge)
        recorded = [upload[0], *flat(upload[1])] if upload else []
        check(self._run("reserve", path, asked, payers, charge.stored, int(seconds * 1000), *recorded))

    def release(self, path: str) -> None:
        """Ends the reservation for the checkpoint at `path`, if there is one."""
        self._run("end_reservation", path)

    def used(self, payer: Payer) -> Used:
        """The payer's use that counts against its limits now."""
        rates = (payer.limits.requests_per_s, payer.limits.tokens_per_s)
        asked = ["" if rate is None else rate for rate in rates]
        models, stored, samples, *found = self._run("used", payer.kind, payer.id, *asked)
        requests, tokens = (float(text) if text else None for text in found)
        return Used(models, self._live_sessions(payer), stored, samples, requests, tokens)

    def _live_sessions(self, payer: Payer) -> int:
        listed = texts(self._redis.smembers(keys.sessions_live(payer.name)))
        if not listed:
            return 0
        heard = self._redis.zmscore(keys.SESSIONS_HEARD, listed)
        return sum(last is not None for last in heard)


def encoded(charge: Charge) -> str:
    """The charge as JSON, as the scripts take it; empty when no payer has a limit."""
    payers = [
        {"kind": payer.kind, "id": payer.id, "name": payer.name, "limits": limits}
        for payer in charge.payers
        if (limits := _given_limits(payer.limits))
    ]
    return json.dumps({**asdict(charge), "payers": payers}) if payers else ""


def encoded_with_payers(charge: Charge) -> tuple[str, str]:
    """The charge as in `encoded`, and the names of all payers, limited or not."""
    return encoded(charge), " ".join(payer.name for payer in charge.payers)


def check(found: Sequence[bytes]) -> None:
    """Raises LimitReached or TooManyRequests when the scripts found a call to be over a limit."""
    if not found or found[0] != _LIMITED:
        return
    name, payer, used, limit, wait_ms = texts(found[1:])
    wait = max(1, math.ceil(int(wait_ms) / 1000))
    text = _TEXTS[name].format(payer=payer.replace(":", " ", 1), used=float(used), limit=float(limit))
    if name in _FINAL:
        raise _FINAL[name](f"{text}; {_SEEN}")
    error = TooManyRequests(f"{text}; try again in {wait} s; {_SEEN}")
    error.retry_after_s = wait
    raise error


def _given_limits(limits: Limits) -> dict[str, float]:
    """The given limits of calls, by name. An absent one is left out, because cjson's null counts as true."""
    return {name: value for name, value in asdict(limits).items() if value is not None and name not in UNCHARGED}
