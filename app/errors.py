"""Every error Tinsmith raises on purpose, and the one table that maps it outward.

    TinsmithError
    ├── RequestError            what a client can see at once, as an HTTP status
    │   ├── BadRequest          400  the content is wrong; sending it again will not help
    │   ├── Unauthorized        401
    │   │   └── InvalidToken    401  a token that is too old, or not ours: another may do
    │   ├── Forbidden           403
    │   │   └── LimitReached    403  a limit that does not pass by itself: something has to go first
    │   ├── NotFound            404  missing, or somebody else's: the two look alike
    │   │   └── RepoNotFound, RevisionNotFound, EntryNotFound  of the Hub's routes, and by the Hub's names
    │   ├── Gone                410  yours, but expired or lost
    │   ├── TooLarge            413
    │   ├── Invalid             422  a field is missing or has the wrong type
    │   ├── TooManyRequests     429  retry later
    │   ├── ClientGone          499  nobody is there to read the answer
    │   └── Unavailable         503  retry later
    │       └── NewerContent    503  only a newer version of ours can read it; a process of that version will
    ├── OpError                 what only running an Op can tell, as a failed future
    │   ├── UserOpError         category "user": the Op's content is at fault
    │   └── ServerOpError       category "server": we are at fault
    ├── Fenced                  another worker owns the model now; throw the state away
    └── SetupError              the operator must change something; the message says what

409 is missing on purpose: the SDK retries it for five minutes.
To add one: pick the parent that says who must act, write one sentence, and give it a status if a client sees it.
Keep every error picklable (one message argument): Celery carries them between processes.
"""

from __future__ import annotations

from typing import ClassVar


class TinsmithError(Exception):
    """The base of all."""


class RequestError(TinsmithError):
    """A request that is answered with `status`; the text is shown to the client."""

    status: ClassVar[int] = 400
    retry_after_s: float | None = None


class BadRequest(RequestError):
    """The content is wrong and stays wrong."""


class Unauthorized(RequestError):
    """No API key, or not one of ours."""

    status = 401


class InvalidToken(Unauthorized):
    """A token that is no good any more; with the key there is a new one."""


class Forbidden(RequestError):
    """The key is known but may not do this."""

    status = 403


class LimitReached(Forbidden):
    """As much is there as the project, or the key, may have."""


class NotFound(RequestError):
    """There is no such thing, or it belongs to someone else."""

    status = 404


class RepoNotFound(NotFound):
    """No model of this name has a tokenizer here."""


class RevisionNotFound(NotFound):
    """The model is here, in another state."""


class EntryNotFound(NotFound):
    """The model is here, without such a file."""


class Gone(RequestError):
    """It was there and is no more; the SDK samples again on this status."""

    status = 410


class TooLarge(RequestError):
    """The body is over the limit."""

    status = 413


class Invalid(RequestError):
    """A field is missing or has the wrong type."""

    status = 422


class TooManyRequests(RequestError):
    """A limit is reached; it passes."""

    status = 429
    retry_after_s = 1.0


class ClientGone(RequestError):
    """The client went away before its answer; nobody reads this one."""

    status = 499


class Unavailable(RequestError):
    """A part we need is down or full; it passes.

    The SDK gives some calls 11 tries in all: with 1 s between them its patience would end after 10 s, not a minute.
    """

    status = 503
    retry_after_s = 5.0


class NewerContent(Unavailable):
    """A newer version of Tinsmith stored this, and this one cannot read it: a newer process can."""


class OpError(TinsmithError):
    """An Op that ran and failed; the future carries the text and `category`."""

    category: ClassVar[str] = "unknown"


class UserOpError(OpError):
    """The Op's own content made it fail; the model is as it was before."""

    category = "user"


class ServerOpError(OpError):
    """The server failed the Op."""

    category = "server"


class Fenced(TinsmithError):
    """A commit or lease was refused: another worker owns the model, or the Op is not next."""


class TriedOften(TinsmithError):
    """A sampling request was not begun: too many workers died while they ran it."""


class SetupError(TinsmithError):
    """The installation or its settings cannot work; the command line exits with 2."""
