"""Records the replies of the state server's scripts and the keys they leave, without values that differ between runs.

Times and random names are masked; a duration is masked only where a step says so. The time to live of a key is rounded
up to ten minutes, so a scenario may take nearly as long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import redis

from app.errors import TinsmithError

_MASKS = (
    (re.compile(r"\b[0-9a-f]{32}\b"), "<uuid>"),  # first: its digits may look like a time
    (re.compile(r"(?<![\d.])11[789]\d{11}(?![\d])"), "<held since>"),
    (re.compile(r"(?<![\d.])(1[789]|2\d)\d{11}(?![\d])"), "<ms>"),
    (re.compile(r"(?<![\d.])(1[789]|2\d)\d{8}\.\d+"), "<s>"),
    (re.compile(r"\b(usage|audit)/([^/]+)/\d{6}\b"), r"\1/\2/<hour>"),
)
_HOURS = ("tinsmith:pages", "tinsmith:pages_closed")
_LONGEST = 400
_KEPT_MS = 600_000


class Recorded(redis.Redis):
    """A client that records the answer of each script."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answers: list[Any] = []

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            answer = super().execute_command(*args, **options)
        except redis.exceptions.NoScriptError:
            raise
        except redis.ResponseError as error:
            if args[0] == "EVALSHA":
                self.answers.append(f"error: {error}")
            raise
        if args[0] == "EVALSHA":
            self.answers.append(answer)
        return answer


class Scenario:
    """Steps against an empty server, each recorded with the answers of its scripts and, if refused, the reason."""

    def __init__(self, client: Recorded) -> None:
        self.client = client
        client.flushall()
        self._messages = client.pubsub()
        self._messages.psubscribe("*")
        assert self._messages.get_message(timeout=60)
        self.steps: list[dict[str, Any]] = []
        self._left: dict[str, Any] = {}

    def __call__(self, step: str, call: Callable[[], Any], *volatile: int) -> Any:
        """Runs a step. `volatile`: parts of the answer, or of each of its rows, that depend on a duration."""
        self.client.answers.clear()
        noted: dict[str, Any] = {"step": step}
        result = None
        try:
            result = call()
        except TinsmithError as error:
            noted["refused"] = "<a rate>" if volatile and "a second" in str(error) else masked(str(error))
        noted["answers"] = [masked(_without(answer, volatile)) for answer in self.client.answers]
        self.steps.append(noted)
        return result

    def left(self, when: str) -> None:
        """Records the keys that the scripts left, if they changed."""
        found = keyspace(self.client)
        changed = {key: found.get(key) for key in found.keys() | self._left if found.get(key) != self._left.get(key)}
        self.steps.append({"left behind": when, "keys": dict(sorted(changed.items())), "told": self._published()})
        self._left = found

    def _published(self) -> list[list[str]]:
        self.client.publish("over", "")
        published = []
        while (message := self._messages.get_message(timeout=60)) is not None and message["channel"] != b"over":
            published.append([message["channel"].decode(), masked(message["data"].decode())])
        return published


def masked(value: Any) -> Any:
    """A value as JSON holds it."""
    if isinstance(value, bytes):
        return masked(value.decode(errors="backslashreplace"))
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return [masked(part) for part in value]
    if isinstance(value, dict):
        return {masked(key): masked(part) for key, part in value.items()}
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 10**11:
        return masked(f"{value:.0f}")
    return value


def keyspace(client: redis.Redis) -> dict[str, Any]:
    """Every key's type, contents, and approximate time to live in minutes."""
    found: dict[str, Any] = {}
    for key in sorted(client.scan_iter(count=1000)):
        kind, kept_ms = client.type(key).decode(), client.pttl(key)
        held = _contents(client, kind, key)
        if key.startswith(b"tinsmith:rates:"):
            held, kept_ms = sorted(held), _KEPT_MS
        if key.decode() in _HOURS:
            held = {masked(page): "<hour>" for page in held} if kind == "zset" else "<hour>"
        kept = None if kept_ms < 0 else -(-kept_ms // _KEPT_MS) * 10
        found[masked(key)] = {"type": kind, "holds": held, **({} if kept is None else {"minutes": kept})}
    return found


def _contents(client: redis.Redis, kind: str, key: bytes) -> Any:
    match kind:
        case "string":
            return masked(client.get(key))
        case "hash":
            return masked(dict(sorted(client.hgetall(key).items())))
        case "zset":
            return {masked(member): masked(score) for member, score in client.zrange(key, 0, -1, withscores=True)}
        case "set":
            return sorted(map(masked, client.smembers(key)))
        case "list":
            return masked(client.lrange(key, 0, -1))
        case "stream":
            return [masked(fields) for _, fields in client.xrange(key)]
    raise AssertionError(f"a key of type {kind}")


def _text(text: str) -> str | dict[str, Any]:
    if text.startswith("{"):  # the script engine decides their order
        try:
            return {"JSON": masked(json.loads(text))}
        except ValueError:
            pass
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text if len(text) <= _LONGEST else f"<{len(text)} characters>"


def _without(answer: Any, volatile: Sequence[int]) -> Any:
    if not isinstance(answer, list) or not volatile:
        return answer
    if answer and all(isinstance(row, list) for row in answer):
        return [_without(row, volatile) for row in answer]
    return ["<varies>" if at in volatile else part for at, part in enumerate(answer)]
