"""Every error that Tinsmith raises on purpose, with its HTTP status or its category of a failed future.

    TinsmithError
    ├── RequestError            answered at once, as an HTTP status
    │   ├── BadRequest          400  the content is wrong; sending it again does not help
    │   ├── Unauthorized        401
    │   │   └── InvalidToken    401  the token has expired or is not from this server; a new one may work
    │   ├── Forbidden           403
    │   │   └── LimitReached    403  a limit that does not pass by itself: something must be deleted or ended first
    │   │       └── BudgetSpent 403  the project's budget is spent; more time or a higher budget helps
    │   ├── NotFound            404  missing, or somebody else's; the answer is the same for both
    │   │   └── RepoNotFound, RevisionNotFound, EntryNotFound  raised by the Hub's routes, named as the Hub does
    │   ├── RequestTimeout      408  the body arrives too slowly
    │   ├── Gone                410  the caller's own, but expired or lost
    │   ├── TooLarge            413
    │   ├── Invalid             422  a field is missing or has the wrong type
    │   ├── TooManyRequests     429  retry later
    │   ├── ClientGone          499  the client has gone and does not read the answer
    │   └── Unavailable         503  retry later
    │       ├── NotReplicated   503  too few replicas have it yet; a repeat is the same call
    │       └── NewerContent    503  only a newer version of Tinsmith can read it; a process of that version does
    ├── OpError                 found only by running an Op, and answered as a failed future
    │   ├── UserOpError         category "user": the Op's content is at fault
    │   │   ├── NoMemory        it does not fit on the trainer's devices
    │   │   └── WeightsOverflow a step made weights that are not finite; discard the state
    │   └── ServerOpError       category "server": the server is at fault
    ├── Fenced                  another worker owns the model now; discard the state
    ├── TriedOften              too many workers died while they ran a sampling request; it is not started again
    ├── Requeue                 the future has no result yet, and will be dispatched again
    │   └── NoTurnYet           the turn on the GPU has not begun in time
    └── SetupError              the operator must change something, which the message names
        └── UnservableModel     starting the model's worker again cannot help

409 is missing on purpose: the SDK retries it for five minutes.
To add one: pick the parent that says who must act, write one sentence, and give it a status if a client sees it.
Keep every error picklable (one message argument): Celery carries them between processes.
"""

from __future__ import annotations

from typing import Any, ClassVar

STATE_SERVER_AWAY = "the state server does not answer or is full; try again soon"
"""The text of an Unavailable that an outage of the state server causes."""


class TinsmithError(Exception):
    """The base class of all errors here."""


class RequestError(TinsmithError):
    """A failed request. It is answered with `status`, and the text is shown to the client."""

    status: ClassVar[int] = 400
    retry_after_s: float | None = None


class BadRequest(RequestError):
    """The content of the request is wrong; sending it again does not help."""


class Unauthorized(RequestError):
    """The request has no API key, or one that this server does not know."""

    status = 401


class InvalidToken(Unauthorized):
    """The token is no longer valid; the client can get a new one with its key."""


class Forbidden(RequestError):
    """The key is known but may not do this."""

    status = 403


class LimitReached(Forbidden):
    """The project or the key already has as much as it may have."""


class BudgetSpent(LimitReached):
    """The project has spent its budget. Calls that were accepted before end as usual."""


class NotFound(RequestError):
    """The object does not exist, or it belongs to someone else."""

    status = 404


class RepoNotFound(NotFound):
    """No model of this name has a tokenizer on this server."""


class RevisionNotFound(NotFound):
    """The model is on this server, but in another revision."""


class EntryNotFound(NotFound):
    """The model is on this server, but it has no such file."""


class RequestTimeout(RequestError):
    """The request was not read to its end, because it arrives too slowly. The SDK sends it again."""

    status = 408


class Gone(RequestError):
    """The object existed and exists no longer; the SDK samples again on this status."""

    status = 410


class TooLarge(RequestError):
    """The body is over the limit."""

    status = 413


class Invalid(RequestError):
    """A field is missing or has the wrong type."""

    status = 422


class TooManyRequests(RequestError):
    """A limit is reached that passes with time."""

    status = 429
    retry_after_s = 1.0


class ClientGone(RequestError):
    """The client closed its connection before the answer; nobody reads this error."""

    status = 499


class Unavailable(RequestError):
    """A part that the server needs is down or full; this passes with time.

    The SDK tries some calls 11 times in all: with 5 s between the tries it gives up after 50 s, with 1 s after 10 s.
    """

    status = 503
    retry_after_s = 5.0


class NotReplicated(Unavailable):
    """The call happened, but too few replicas have it yet (`engine.replicas`), so a failover could lose it. A repeat is
    answered once enough replicas have it."""

    reply: Any = None
    """The state server's reply to the call; None if there is none."""


class NewerContent(Unavailable):
    """A newer version of Tinsmith stored the content. This version cannot read it; a newer process can."""


class OpError(TinsmithError):
    """An Op ran and failed; the future carries the text and `category`."""

    category: ClassVar[str] = "unknown"


class UserOpError(OpError):
    """The Op's own content made it fail; the model is as it was before."""

    category = "user"


class NoMemory(UserOpError):
    """Memory ran out, though the model had the trainer's devices to itself. In a restore this says nothing about the
    model or its files."""


class WeightsOverflow(UserOpError):
    """An optim_step made weights that are not finite. The trainer's state of the model is spoiled: once the failure is
    committed, it must be discarded, and the journal restores the model as it was before."""


class ServerOpError(OpError):
    """The server failed the Op."""

    category = "server"


class Fenced(TinsmithError):
    """A commit or lease was refused: another worker owns the model, or the Op is not next."""


class TriedOften(TinsmithError):
    """A sampling request is not started, because too many workers died while they ran it."""


class Requeue(TinsmithError):
    """The future has no result yet, and will be dispatched again."""


class NoTurnYet(Requeue):
    """The turn on the GPU has not begun in the time that the caller can wait."""


class SetupError(TinsmithError):
    """The installation or its settings cannot work; the command line exits with 2."""


class UnservableModel(SetupError):
    """A base model that can be loaded but not served: starting its worker again cannot help."""
