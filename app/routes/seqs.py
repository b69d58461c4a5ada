"""A call that gets a final 4xx has used its seq_id up: it will not come again, so later ones must not wait for it.

So has one that is over a limit that does not pass (LimitReached), though other 403s leave the seq free: whoever may not
train must not change what a run does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from flask import request
from werkzeug.exceptions import HTTPException

from app.auth import current_caller
from app.errors import LimitReached, RequestError
from app.routes.bodies import batch_content, json_content
from app.routes.context import services
from app.routes.errors import NOT_UNICODE, describe
from app.stores.interfaces import RefusalKind
from app.wire import forward_backward, json_bodies
from app.wire.forward_backward import Envelope

_FINAL = (400, 413, 422)
View = Callable[..., Any]


def consumes_seq(*, gradient: bool = False) -> Callable[[View], View]:
    """Goes right below the route, outside of body parsing, so that its 422 counts too.

    `gradient`: what the call would have added is then missing from the next optim_step.
    A 400 for a seq used before changes nothing: the journal refuses only seqs that are free.
    """

    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return view(*args, **kwargs)
            except RequestError as error:
                if error.status in _FINAL or isinstance(error, LimitReached):
                    _refuse(str(error), gradient)
                raise
            except HTTPException as error:
                if error.code in _FINAL:
                    _refuse(describe(error), gradient)
                raise
            except UnicodeEncodeError:  # a 400 as well (app/routes/errors.py)
                _refuse(NOT_UNICODE, gradient)
                raise

        return wrapped

    return decorate


def read_envelope() -> Envelope:
    """Whom the body at hand is for. Raises BadRequest or TooLarge."""
    if request.is_json:
        return json_bodies.open_envelope(json_content())
    return forward_backward.open_envelope(batch_content())


def _refuse(reason: str, gradient: bool) -> None:
    try:
        envelope = read_envelope()
    except (RequestError, HTTPException):
        return
    kind: RefusalKind = "lost_batch" if gradient and not envelope.forward_only else "skip"
    kept = reason.encode(errors="backslashreplace").decode()  # a field's name may be what is wrong
    services().admission.refuse(envelope.model_id, envelope.seq, current_caller(), kept, kind)
