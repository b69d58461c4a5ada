"""A session's calls on a timeline, in the JSON form that Perfetto and Chrome's viewer read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from app import ids
from app.domain.identity import Caller
from app.domain.records import Model, Sampler, Session
from app.errors import NotFound
from app.services.ownership import load_readable
from app.signing import UrlSigner
from app.stores.interfaces import Call, Calls, Records

_LINK_SECONDS = 3600


class TraceService:
    """Nothing is built beforehand or kept: the link leads to the trace as it is when it is followed."""

    def __init__(self, store: Records, calls: Calls, signer: UrlSigner) -> None:
        self._records, self._calls, self._signer = store, calls, signer

    def export(self, session_id: str, caller: Caller) -> dict[str, str]:
        """The body of trace_export, with a link that needs no key. Raises NotFound."""
        load_readable(self._records, Session, session_id, caller)
        try:
            url = self._signer.url(_route(session_id), int(time.time()) + _LINK_SECONDS)
        except NotFound as error:
            return {"status": "failed", "error": str(error)}
        return {"status": "ready", "url": url}

    def read(self, session_id: str, expires: int, signature: str) -> dict[str, Any]:
        """The trace behind a link. Raises Forbidden."""
        self._signer.check(_route(session_id), expires, signature)
        return {"displayTimeUnit": "ms", "traceEvents": list(self._events(session_id))}

    def _events(self, session_id: str) -> Iterator[dict[str, Any]]:
        """One process for each run and each sampler; its calls overlap, as they are sent before the last has ended."""
        models = [id_ for id_, _ in self._records.list(Model.namespace, ids.model_prefix(session_id))]
        samplers = [id_ for id_, _ in self._records.list(Sampler.namespace, ids.sampler_prefix(session_id))]
        calls = [(id_, self._calls.of_model(id_)) for id_ in models]
        calls += [(id_, self._calls.of_sampler(id_)) for id_ in samplers]
        for process, (id_, found) in enumerate(calls, start=1):
            yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": id_}}
            for call in found:
                yield from _span(process, call)


def _span(process: int, call: Call) -> Iterator[dict[str, Any]]:
    """From its admission to its result; open where there is none yet."""
    common = {"name": call.kind, "cat": "call", "id": call.request_id, "pid": process, "tid": 0}
    yield {**common, "ph": "b", "ts": round(call.admitted * 1e6), "args": {"state": call.state}}
    if call.ended is not None:
        yield {**common, "ph": "e", "ts": round(call.ended * 1e6)}


def _route(session_id: str) -> str:
    return f"sessions/{session_id}/trace"
