"""What Tinsmith keeps and where, as interfaces. Every implementation passes the suites in tests/conformance/."""

from app.stores.interfaces.allowances import Allowances
from app.stores.interfaces.backlog import Backlog, ModelLine, Unfinished, WaitingSample
from app.stores.interfaces.calls import Call, Calls
from app.stores.interfaces.completions import Completion, Completions
from app.stores.interfaces.journal import (
    Admission,
    Entry,
    Future,
    Head,
    HeldElsewhere,
    Lease,
    OpLog,
    Pending,
    QueueBounds,
    RefusalKind,
)
from app.stores.interfaces.lifecycle import Holder, Lifecycle
from app.stores.interfaces.objects import ObjectStore
from app.stores.interfaces.payloads import Payloads
from app.stores.interfaces.records import Record, Records, Write

__all__ = [
    "Admission",
    "Allowances",
    "Backlog",
    "Call",
    "Calls",
    "Completion",
    "Completions",
    "Entry",
    "Future",
    "Head",
    "HeldElsewhere",
    "Holder",
    "Lease",
    "Lifecycle",
    "ModelLine",
    "ObjectStore",
    "OpLog",
    "Payloads",
    "Pending",
    "QueueBounds",
    "Record",
    "Records",
    "RefusalKind",
    "Unfinished",
    "WaitingSample",
    "Write",
]
