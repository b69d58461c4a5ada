"""What both kinds of answer are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from app.services.openai.generation import Delta


@dataclass(frozen=True, slots=True)
class Head:
    """`id` ends with the request id of the first prompt, as logs and Flower show it."""

    request_id: str
    created: int
    model: str


class Form(Protocol):
    """How a kind of answer is written."""

    def whole(self, head: Head, deltas: Iterable[Delta]) -> dict[str, Any]:
        """All at once."""
        ...

    def chunks(self, head: Head, deltas: Iterable[Delta]) -> Iterator[dict[str, Any]]:
        """One by one, as the deltas come."""
        ...

    def last(self, head: Head) -> dict[str, Any]:
        """A chunk without choices, for the usage."""
        ...


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """One for each choice, in order."""
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        choices.setdefault(delta.choice, []).append(delta)
    return [_joined(index, parts) for index, parts in sorted(choices.items())]


def usage(prompt: int, sampled: int) -> Mapping[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _joined(index: int, parts: list[Delta]) -> Delta:
    tokens = tuple(chain.from_iterable(part.tokens for part in parts))
    return Delta(index, "".join(part.text for part in parts), tokens, parts[-1].finish)
