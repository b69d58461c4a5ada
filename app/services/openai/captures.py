"""Keeps the answers of chats and completions as datums, for the projects that ask for it, and lists them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from app import ids
from app.domain.accounts import Caller
from app.domain.captures import Capture, CapturedSequence
from app.domain.records import Sampler
from app.domain.sampling import SampledSequence, SampleRequest
from app.errors import NotFound, Unavailable
from app.services.admission import LimitsOf
from app.services.tenants import audit
from app.services.tenants.access import check_role
from app.stores.objects.captures import CaptureFiles, Place
from app.stores.redis.records import RedisRecords

log = logging.getLogger(__name__)


class CaptureService:
    """The captures of projects with `capture_days`."""

    def __init__(self, files: CaptureFiles, limits: LimitsOf, records: RedisRecords) -> None:
        self._files, self._limits, self._records = files, limits, records

    def keep(
        self, sampler: Sampler, request_id: str, request: SampleRequest, sequences: Sequence[SampledSequence]
    ) -> None:
        """Keeps an answer if its project wants so; a prompt with images is not kept. No answer fails because the object
        store is away: it is then not kept, which the log says."""
        wanted = self._files.can_keep and self._limits.project(sampler.owner).capture_days is not None
        if not wanted or request.images or not sequences:
            return
        kept = [CapturedSequence(each.tokens.tolist(), each.logprobs.tolist()) for each in sequences]
        model = sampler.model_path or sampler.base_model
        run = ids.TinkerPath.parse(sampler.model_path).model_id if sampler.model_path else ""
        capture = Capture(request_id, self._records.now(), model, request.prompt.tolist(), kept)
        try:
            self._files.add(sampler.owner, run, capture)
        except Unavailable as error:
            log.warning("an answer is not captured: %s", error, extra={"request_id": request_id})

    def page(self, caller: Caller, run: str | None, offset: int, limit: int) -> dict[str, Any]:
        """The captures of the caller's project, oldest first; of one run, or with an empty `run` of base models. Raises
        Forbidden, NotFound on a server that keeps none, and Unavailable."""
        found = self._found(caller, run)
        captures = self._files.read(found[offset : offset + limit])
        rows = [
            {"id": each.id, "created": each.created, "model": each.model, "datums": list(each.datums())}
            for each in captures
        ]
        return {"captures": rows, "cursor": {"offset": offset, "limit": limit, "total_count": len(found)}}

    def delete(self, caller: Caller, run: str | None) -> int:
        """Deletes the same captures, and returns their number."""
        found = self._found(caller, run)
        about: audit.About = {"run_id": run, "captures": len(found)}
        audit.note(self._records, caller, caller.project, "capture_delete", about, urgent=True)
        self._files.remove(found)
        return len(found)

    def _found(self, caller: Caller, run: str | None) -> list[Place]:
        check_role(caller, caller.project)
        if not self._files.can_keep:
            raise NotFound(
                "this server keeps no answers: its operator has to set capture_secret in the config file, to 32 random "
                "characters or more"
            )
        return [place for place in self._files.places(caller.project) if run is None or place.run == run]
