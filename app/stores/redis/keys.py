"""Every Redis key, in one place. Scripts build the same texts from the ids they are given.

    models:<model>      HASH  the Model record, and the journal's head: applied, epoch, worker, snapshot, snapshot_seq,
                              epoch_floor after a rebuild, last_request and unloaded (ms), and ended (deleted) once it
                              is no more
    journal:<model>     ZSET  seq -> seq: Ops behind the snapshot (seq > snapshot_seq), applied or waiting
    op:<request>        HASH  kind, attempts, runner, former, admitted, doomed, spilled: one journalled Op or sampling
                              request; former are those that began it before and did not leave it, as JSON: worker ->
                              ms since when it is missed, or 0. Of a sampling request adapter, the prefix of the
                              version it was admitted for; rows, the sequences it asks for; node, where they count:
                              the one that was rung for it, or began it; payers, whom they count for;
                              ring: "rung", "held" while nobody is to be rung for it, or "off" once it was put off
    payload:<request>   STR   its encoded content, as long as it may run or be replayed
    payload_bytes       STR   the bytes of all payload:* together
    spillable           ZSET  request whose payload is worth an object -> ms of its admission, 0 if it goes at once
    spilling            ZSET  object being written for a payload -> ms of its begin
    spill_garbage       SET   objects of dropped payloads, to be deleted
    staged:<uuid>       STR   a large payload on its way into the journal; expires
    future:<request>    HASH  kind, model, owner, digest, state, body, type, refused: what a poll reads; admitted
                              and ended, in ms; expires
    lease:<id>          STR   "node/boot" of the worker that owns a model or runs a sampling request, or lives, under
                              its own name; expires
    pending             ZSET  model or sampling request -> ms of its last progress, while something waits; of one that
                              is held 10^13 more
    pending_queue       HASH  the same ids -> the queue to ring on
    sampling:<queue>    HASH  sampling request that is not finished -> the tokens it may take
    sampling_tokens     HASH  queue -> the sum of those
    placed:<queue>      HASH  node -> the sequences of all unfinished requests that count there
    rung:<queue>        HASH  project -> the sequences of its unfinished requests that were rung for
    rung_rows           HASH  queue -> the sum of those
    held:<queue>/<project>  ZSET  sampling request that nobody was rung for yet -> ms of its admission
    holding:<queue>     SET   the projects that have any of those
    sampling_of         HASH  payer ("project:<id>", "key:<id>") -> the sequences of all its unfinished requests
    stopped:<request>   STR   what a sampling request that was called off while it ran was charged for, as JSON, until
                              its runner says what it took of that; expires
    rates:<payer>       HASH  requests, tokens: what was missing in the bucket of that rate at requests_at, tokens_at
                              (ms); expires when both are full again
    runs:<payer>        SET   its runs that have not ended, in sessions that have not
    runs_listed         STR   is there once all of them are
    stored              HASH  payer -> the bytes of its checkpoints
    home:<adapter>      STR   the node that an adapter's requests go to, by its prefix, or of the base by the sampler's
                              id; expires an hour after the last one
    sampled:<sampler>   SET   its sampling requests that are not finished
    samplers_asked      SET   the samplers that have any
    completed:<target>  ZSET  sampling request whose result was not read yet -> its place among all that came to
                              their end; a target is "<sampler>/<clone>" (app/ids.py)
    completions         STR   counts the sampling requests that came to their end: the newest cursor there is
    sessions_heard      ZSET  session -> ms when it was heard of last, unless it has ended
    sessions_ended      ZSET  session -> ms when it was finished or expired, until its models are ended too
    orphans             ZSET  object-store prefix -> ms since when nothing is known to refer to it
    <namespace>:<id>    HASH  sessions, samplers, handovers, checkpoints, losses, workers (app/domain/records.py);
                              a sampler's also counts the clients that joined it
                              organisations, projects, users, keys (app/domain/accounts.py): a copy of what the object
                              store holds, looked up at every request
    recalled:accounts   HASH  done: "true" once the state server holds all accounts that the object store holds
    index:<namespace>   ZSET  the ids of a namespace, all of score 0, so that they are in order
    stream:<request>    STREAM  on the broker: tokens of a sampling request that is answered as they come: sample,
                              place, tokens, logprobs; expires, and may be lost: the result holds them all
    page:<page>         HASH  what was used, or done, in a project in an hour: "<book>/<project>/<hour>"
                              (app/stores/pages.py); goes to the object store when that is over
    pages               ZSET  the same names -> the hour
    pages_closed        STR   the last hour of which nothing is written any more
    storage_measured    STR   when the checkpoints' sizes were counted last, in unix seconds
    taking_calls        STR   is there while an API process lives; expires
    done                pub/sub channel: a request id, once its result can be read; on the broker, more of its stream
    aborted             pub/sub channel: a sampling request's id, once nobody wants it to go on

All times are the Redis server's own (TIME), so no two clocks are ever compared.
"""

from __future__ import annotations

from app.stores.pages import Page

PREFIX = "tinsmith:"
DONE_CHANNEL = PREFIX + "done"
ABORTED_CHANNEL = PREFIX + "aborted"
TAKING_CALLS = PREFIX + "taking_calls"
PENDING = PREFIX + "pending"
PENDING_QUEUE = PREFIX + "pending_queue"
SESSIONS_HEARD = PREFIX + "sessions_heard"
SESSIONS_ENDED = PREFIX + "sessions_ended"
ORPHANS = PREFIX + "orphans"
PAGES = PREFIX + "pages"
STORAGE_MEASURED = PREFIX + "storage_measured"
SPILL_GARBAGE = PREFIX + "spill_garbage"


def model(model_id: str) -> str:
    return f"{PREFIX}models:{model_id}"


def journal(model_id: str) -> str:
    return f"{PREFIX}journal:{model_id}"


def op(request_id: str) -> str:
    return f"{PREFIX}op:{request_id}"


def payload(request_id: str) -> str:
    return f"{PREFIX}payload:{request_id}"


def staged(name: str) -> str:
    return f"{PREFIX}staged:{name}"


def future(request_id: str) -> str:
    return f"{PREFIX}future:{request_id}"


def stream(request_id: str) -> str:
    return f"{PREFIX}stream:{request_id}"


def lease(id_: str) -> str:
    return f"{PREFIX}lease:{id_}"


def record(namespace: str, key: str) -> str:
    return f"{PREFIX}{namespace}:{key}"


def index(namespace: str) -> str:
    return f"{PREFIX}index:{namespace}"


def page(page: Page) -> str:
    return f"{PREFIX}page:{page}"


def placed(queue: str) -> str:
    return f"{PREFIX}placed:{queue}"


def sampled(sampler_id: str) -> str:
    return f"{PREFIX}sampled:{sampler_id}"


def completed(target: str) -> str:
    return f"{PREFIX}completed:{target}"
