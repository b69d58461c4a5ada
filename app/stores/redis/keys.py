"""Every Redis key, in one place. Scripts build the same texts from the ids they are given.

    models:<model>      HASH  the Model record, and the head of its journal: applied, epoch, worker, snapshot,
                              snapshot_seq, epoch_floor after a rebuild, last_request and unloaded (ms); steps
                              and trained_tokens, of the committed calls; exempted, the last seq in the journal at
                              its last call that was exempt from rates; let_in, the bytes of calls that were admitted
                              since there was room; ended
                              ("deleted") once the model has ended; behind sentinels also history, the number of the
                              history in which the epoch was given out, and epoch_floor, the first epoch there
    progress:<model>    STREAM  its newest points (app/domain/progress.py): seq, kind, and the rest as JSON; their ids
                              have the ms of their commits; gone once the model has ended
    recorded:<model>    STREAM  the newest metrics that its client recorded: point, [step, {name: value}] as JSON, and
                              event, the id of their event, or ''; gone once the model has ended
    history             HASH  behind sentinels: primary, the replication id of the last primary that was seen, and
                              number, the ms when its history began
    journal:<model>     ZSET  seq -> seq: Ops behind the snapshot (seq > snapshot_seq), applied or waiting
    op:<request>        HASH  one journalled Op or sampling request: kind, attempts, runner, former, admitted, doomed,
                              dooms, spilled. former is JSON, worker -> ms since when the worker is missed, or 0: the
                              workers that began the request before and did not leave it. A sampling request also has:
                              adapter, the prefix of the version it was admitted for; rows, the sequences it asks for;
                              node, the node that counts these sequences, since the request was dispatched to it or
                              began there; payers, the payers that the sequences count for; ring: "rung" once it is
                              dispatched, "held" while it is throttled, "off" after it was requeued, "paused" while
                              its session is silent
    ending              SET   ended models whose journal is not deleted yet
    restore:<model>     HASH  attempts, runner, former, as of an Op: the restores of a model that ended their worker;
                              gone after one that succeeds, or an hour after the first
    payload:<request>   STR   its encoded content, as long as it may run or be replayed
    payload_bytes       STR   the bytes of all payload:* together
    spillable           ZSET  request with a payload that is worth an object -> ms of its admission, 0 to spill at once
    spilling            ZSET  object that is being written for a payload or a result -> ms of the write's start
    spill_garbage       SET   objects of dropped payloads and results, to be deleted
    staged:<uuid>       STR   a large payload or result on its way into the journal or to its future; expires
    future:<request>    HASH  kind, model, owner, digest, state, body, type, refused: the fields that a poll reads;
                              admitted and ended, in ms; trace, the context of its trace, if any; expires
    result:<request>    STR   a result of megabytes, which its future has no `body` for but its `size`; expires with the
                              future, and is deleted once the result is `spilled`
    results             HASH  request with a large result -> JSON: its size, the owner for which it counts, and the key
                              of the object that holds it; the future then has `spilled` and `size` instead of `body`
    result_bytes        HASH  project -> the bytes of these results
    results_expire      ZSET  the same requests -> ms when the future expires; a process of an earlier version changes
                              results and not this set
    results_due         SET   the requests whose results have to move to the object store
    lease:<id>          STR   "node/boot" of the worker that owns the model or runs the sampling request <id>; a
                              worker's own name as <id> shows that it lives; expires
    nodes               HASH  node -> the claim of its newest worker, as JSON: worker, queue, and where it runs
    pending             ZSET  model or sampling request -> ms of its last progress, while something waits; 10^13 is
                              added for a throttled or paused request
    pending_queue       HASH  the same ids -> the queue to dispatch to
    sampling:<queue>    HASH  unfinished sampling request -> the tokens it may take
    sampling_tokens     HASH  queue -> the sum of these tokens
    placed:<queue>      HASH  node -> the sequences of all unfinished requests that count there
    rung:<queue>        HASH  project -> the sequences of its unfinished requests that were dispatched
    rung_rows           HASH  queue -> the sum of these sequences
    held:<queue>/<project>  ZSET  throttled sampling request, not dispatched yet -> ms of its admission
    holding:<queue>     SET   the projects that have throttled requests
    off:<queue>/<project>  ZSET  requeued sampling request that was not begun again -> ms of its last requeue; an entry
                              counts for an hour, as a process of an earlier version adds and removes none; expires
    off_projects:<queue>  ZSET  the projects that have requeued requests -> ms of the last requeue; counts as long
    paused:<sampler>    SET   its requests that are paused, because its session is silent
    paused_rows:<queue> HASH  project -> the sequences of its paused requests
    sampling_of         HASH  payer ("project:<id>", "key:<id>") -> the sequences of all its unfinished requests
    stopped:<request>   STR   the charge and the run, as JSON, of a sampling request that was cancelled while it ran,
                              until its runner reports its usage; expires
    rates:<payer>       HASH  requests, tokens: the amount missing in the bucket of that rate at requests_at, tokens_at
                              (ms); expires when both buckets are full again
    runs:<payer>        SET   its live runs; those that ended with their session, in silence, are removed at a count, or
                              by a maintenance task that corrects all lists in turn
    stored              HASH  payer -> the bytes of its checkpoints
    reserved            HASH  payer -> the bytes reserved for checkpoints that are not made yet
    reservations        HASH  path of such a checkpoint -> its reservation as JSON: bytes, payers, lapses (ms)
    reservations_lapse  ZSET  the same paths -> ms when the reservation lapses
    routes:<request>    STR   "<day>/<attempt>": the attempt that gave a sampling request its result, as in the names of
                              the files of its routes; expires with these
    route_bytes:<day>   HASH  payer -> the bytes of its routes of that day
    route_days          SET   the days with such bytes
    checkpoints_of:<project>  SET  the paths of its checkpoints; a process of an earlier version changes checkpoints and
                              not this set, and the sum in `stored` shows it
    home:<adapter>      STR   affinity: the node that an adapter's requests go to, by the adapter's prefix; for the
                              base model by the sampler's id; expires an hour after the last request
    sampled:<sampler>   SET   its unfinished sampling requests
    samplers_used       ZSET  sampler -> ms when it last got a request or a client; older entries are removed
    ephemeral_bytes     HASH  payer -> the bytes of its adapters of saves without a path
    ended_samplers:<sampler>  HASH  a copy of the record of a sampler that has ended: requests that still run count
                              their usage by it; expires
    samplers_asked      SET   the samplers that have unfinished requests
    completed:<target>  ZSET  finished sampling request with an unread result -> its number among all finished ones;
                              a target is "<sampler>/<clone>" (app/ids.py)
    completions         STR   the count of finished sampling requests: the newest cursor
    sessions_heard      ZSET  session that has not ended -> ms of its last sign of life
    sessions_ended      ZSET  session -> ms when it was finished or expired, until its models are ended too
    sessions_of:<project>  ZSET  its session, ended or not -> unix seconds of its creation. A process of an earlier
                              version changes sessions and not these lists: RedisRecords.list_sessions sees it, and a
                              maintenance task corrects all lists in turn
    session_owners      HASH  session -> the project whose list it is on
    models_of:<project>  ZSET  its run, ended or not -> unix seconds of its creation, corrected as `sessions_of` is
    model_owners        HASH  run -> the project whose list it is on
    sessions_live:<payer>  SET  its sessions that have not ended; those that expired are removed as `runs` are
    orphans             ZSET  object-store prefix -> ms since when no known reference to it exists, 0 while its files
                              are being removed
    <namespace>:<id>    HASH  sessions, samplers, handovers, checkpoints, uploads, losses, workers, refusals,
                              demands, last_workers (app/domain/records.py);
                              a session's record also has loss_bytes, the bytes of its custom losses;
                              a sampler's record also counts the clients that joined it; that of a save without a
                              path has size_bytes, and given_up (ms) once its adapter is to be deleted; unless it
                              follows a run's newest weights, the record is removed engine.result_unread_s later,
                              and not before its routes;
                              a checkpoint's has deleting, its prefix, once its deletion has begun
                              organisations, projects, users, keys (app/domain/accounts.py): a copy of the object
                              store's accounts, looked up at every request
    base_weights        HASH  base model -> the id of the weights that its runs and checkpoints depend on
                              (workers/models/loading/weights_id.py)
    object_store:id     HASH  id: that of the object store whose files are recorded here, as JSON text; its object
                              store-id has the same (app/stores/store_id.py)
    recalled:accounts   HASH  done: "true" once the state server holds all accounts that the object store holds
    index:<namespace>   ZSET  the ids of a namespace, all of score 0, so that they are in order
    stream:<request>    STREAM  on the broker: the tokens of a sampling request with a streamed answer: index, place,
                              tokens, logprobs; expires, and may be lost: the result holds all tokens
    page:<page>         HASH  usage or audit entries of a project in one hour: "<ledger>/<project>/<hour>"
                              (app/stores/pages.py); moves to the object store when the hour is over
    month:<project>/<month>  HASH  "<kind> <base model>" -> usage of a project in one month, counted from January 1970;
                              a budget is compared with it; expires
    pages               ZSET  the same names -> the hour
    pages_closed        STR   the last hour whose pages are closed: nothing is written to them any more
    storage_measured    STR   the time of the last measurement of the checkpoints' sizes, in unix seconds
    taking_calls        STR   exists while an API process lives: "pieces" if the last one to write it reads results of
                              megabytes in pieces, '' if it is of an earlier version; expires
    earlier_api         STR   exists while an API process of such a version lives beside others; expires
    shortage            STR   the reason why no call is admitted, while a disk of an API process is nearly full; expires
    calls_taken         HASH  since: the end of the last time in which no calls were accepted; seen: the last check (ms)
    marks               STR   a count that is written in front of each WAIT (app/stores/redis/durability.py)
    revoked             LIST  futures that ended without a result of a run: cancelled, or of an ended model; a
                              maintenance task takes them off and sends their task events
    done                pub/sub channel: a request id, once its result can be read; on the broker, once its stream has
                              more entries
    aborted             pub/sub channel: the id of a sampling request, once it is cancelled

All times come from the Redis server's clock (TIME), so no two clocks are ever compared.
"""

from __future__ import annotations

from app.stores.pages import LedgerPage

PREFIX = "tinsmith:"
DONE_CHANNEL = PREFIX + "done"
ABORTED_CHANNEL = PREFIX + "aborted"
TAKING_CALLS = PREFIX + "taking_calls"
EARLIER_API = PREFIX + "earlier_api"
SHORTAGE = PREFIX + "shortage"
CALLS_TAKEN = PREFIX + "calls_taken"
PENDING = PREFIX + "pending"
PENDING_QUEUE = PREFIX + "pending_queue"
RUNG_ROWS = PREFIX + "rung_rows"
SAMPLERS_ASKED = PREFIX + "samplers_asked"
SESSIONS_HEARD = PREFIX + "sessions_heard"
SESSIONS_ENDED = PREFIX + "sessions_ended"
ORPHANS = PREFIX + "orphans"
PAGES = PREFIX + "pages"
STORAGE_MEASURED = PREFIX + "storage_measured"
SPILLING = PREFIX + "spilling"
SPILL_GARBAGE = PREFIX + "spill_garbage"
REVOKED = PREFIX + "revoked"
STORED = PREFIX + "stored"


def model(model_id: str) -> str:
    return f"{PREFIX}models:{model_id}"


def journal(model_id: str) -> str:
    return f"{PREFIX}journal:{model_id}"


def progress(model_id: str) -> str:
    return f"{PREFIX}progress:{model_id}"


def recorded(model_id: str) -> str:
    return f"{PREFIX}recorded:{model_id}"


def op(request_id: str) -> str:
    return f"{PREFIX}op:{request_id}"


def payload(request_id: str) -> str:
    return f"{PREFIX}payload:{request_id}"


def staged(name: str) -> str:
    return f"{PREFIX}staged:{name}"


def future(request_id: str) -> str:
    return f"{PREFIX}future:{request_id}"


def result(request_id: str) -> str:
    return f"{PREFIX}result:{request_id}"


def stream(request_id: str) -> str:
    return f"{PREFIX}stream:{request_id}"


def lease(id_: str) -> str:
    return f"{PREFIX}lease:{id_}"


def record(namespace: str, key: str) -> str:
    return f"{PREFIX}{namespace}:{key}"


def index(namespace: str) -> str:
    return f"{PREFIX}index:{namespace}"


def page(page: LedgerPage) -> str:
    return f"{PREFIX}page:{page}"


def placed(queue: str) -> str:
    return f"{PREFIX}placed:{queue}"


def paused(sampler_id: str) -> str:
    return f"{PREFIX}paused:{sampler_id}"


def sampled(sampler_id: str) -> str:
    return f"{PREFIX}sampled:{sampler_id}"


def completed(target: str) -> str:
    return f"{PREFIX}completed:{target}"


def routes(request_id: str) -> str:
    return f"{PREFIX}routes:{request_id}"


def owned(namespace: str, project: str) -> str:
    """The list of a project's sessions or runs, whose records are in the namespace."""
    return f"{PREFIX}{namespace}_of:{project}"


def owners(namespace: str) -> str:
    return f"{PREFIX}{namespace.removesuffix('s')}_owners"


def sessions_live(payer: str) -> str:
    return f"{PREFIX}sessions_live:{payer}"


def checkpoints_of(project: str) -> str:
    return f"{PREFIX}checkpoints_of:{project}"
