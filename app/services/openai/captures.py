"""Keeps the answers of chats and completions as datums, for the projects that have `capture_days`, and lists them."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import redis

from app import ids
from app.domain.accounts import Caller
from app.domain.captures import Capture, CapturedSequence
from app.domain.records import Sampler
from app.domain.sampling import SampledSequence, SampleRequest
from app.errors import BadRequest, NotFound, Unavailable
from app.services.tenants import audit
from app.services.tenants.access import check_role
from app.services.tenants.limits import LimitsFinder
from app.stores.objects.captures import CaptureFiles
from app.stores.redis.records import RedisRecords

log = logging.getLogger(__name__)
# A token takes some 25 bytes of JSON in a datum, which repeats the prompt for each sequence.
_MOST_TOKENS = 2**20
_NAME = re.compile("[0-9a-f-]*")
"""The id of a capture, or none for the first page."""


class CaptureService:
    """The captures of all projects."""

    def __init__(self, files: CaptureFiles, limits: LimitsFinder, records: RedisRecords) -> None:
        self._files, self._limits, self._records = files, limits, records

    def keep(
        self, sampler: Sampler, request_id: str, request: SampleRequest, sequences: Sequence[SampledSequence]
    ) -> None:
        """Keeps an answer if its project has `capture_days`, except one with images or with over a million tokens. It
        raises nothing while a store is away: the log then says that this answer is not kept."""
        tokens = sum(len(request.prompt) + len(each.tokens) for each in sequences)
        if not self._files.can_keep or request.images or not 0 < tokens <= _MOST_TOKENS:
            return
        try:
            days = self._limits.project(sampler.owner).capture_days
            if days is not None:
                kept = [CapturedSequence(each.tokens.tolist(), each.logprobs.tolist()) for each in sequences]
                model = sampler.model_path or sampler.base_model
                capture = Capture(request_id, self._records.now(), model, request.prompt.tolist(), kept)
                self._files.add(sampler.owner, _run_of(sampler), capture, days)
        except (Unavailable, redis.RedisError) as error:
            log.warning("an answer is not kept: %s", error, extra={"request_id": request_id})

    def page(self, caller: Caller, run: str | None, after: str, limit: int) -> dict[str, Any]:
        """The captures of the caller's project, oldest first, behind the one with the id `after`: all, or those of one
        run, or with an empty `run` those of base models. A page has at most `limit` of them, and fewer once it has a
        million tokens. Raises Forbidden, BadRequest, NotFound on a server that keeps none, and Unavailable."""
        self._check(caller, run)
        if not _NAME.fullmatch(after):
            raise BadRequest(f"after {after[:200]!r} is not the last_id of a page")
        found = self._files.page(caller.project, run, after, limit + 1)
        rows: list[dict[str, Any]] = []
        tokens, read = 0, 0
        for place in found[:limit]:
            capture = self._files.read(place)
            tokens += capture.tokens if capture else 0
            if rows and tokens > _MOST_TOKENS:
                break
            read += 1
            if capture:
                shown = {"created": capture.created, "model": capture.model, "datums": list(capture.datums())}
                rows.append({"id": place.name, "request_id": capture.id, **shown})
        return {"captures": rows, "has_more": read < len(found), "last_id": found[read - 1].name if read else after}

    def delete(self, caller: Caller, run: str | None) -> int:
        """Deletes the same captures, and returns their number. Raises as `page` does."""
        self._check(caller, run)
        found = self._files.places(caller.project, run)
        if found:
            about: audit.About = {"run_id": run, "captures": len(found)}
            once = f"delete {found[-1].name}"
            audit.note(self._records, caller, caller.project, "capture_delete", about, once=once, urgent=True)
            self._files.remove(found)
        return len(found)

    def _check(self, caller: Caller, run: str | None) -> None:
        check_role(caller, caller.project)
        if run and not ids.is_model_id(run):
            raise BadRequest(f"run_id {run[:200]!r} is not the id of a run")
        if not self._files.can_keep:
            raise NotFound(
                "this server keeps no answers: its operator has to set capture_secret in the config file, to 32 random "
                "characters or more"
            )


def _run_of(sampler: Sampler) -> str:
    """The run whose weights answered; empty for a base model."""
    return ids.TinkerPath.parse(sampler.model_path).model_id if sampler.model_path else ""
