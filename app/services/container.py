"""Builds every service that the routes use, once per process."""

from __future__ import annotations

from dataclasses import dataclass

from app.dispatch import Dispatcher, celery_app
from app.errors import SetupError
from app.services.admission import AdmissionService
from app.services.base_models import BaseModels
from app.services.checkpoints import ArchiveService, CheckpointSearch, CheckpointService, CopyService
from app.services.hub import HubService
from app.services.imports.importer import Importer
from app.services.imports.uploads import UploadService
from app.services.models import ModelService, RunService
from app.services.openai.captures import CaptureService
from app.services.openai.samplers import Samplers
from app.services.openai.service import OpenAiService
from app.services.openai.streaming import ResultStream
from app.services.polling import BatchPollService, CancelService, FutureFinder, LongPollLimiter, LongPolls, PollService
from app.services.queue import QueueService, QueueSnapshots, QueueStates
from app.services.sampling import SamplingService
from app.services.sessions import SessionSearch, SessionService, TraceService
from app.services.teardown import Teardown
from app.services.tenants.access import Sources
from app.services.tenants.accounts import AccountRecovery, AccountService
from app.services.tenants.administration import Administration
from app.services.tenants.audit import AuditService
from app.services.tenants.authentication import Authenticator, OwnKey, Tokens
from app.services.tenants.limits import LimitsFinder, QuotaService
from app.services.tenants.spending import Spending
from app.services.tenants.usage import UsageService
from app.services.training import CustomLossService, RouteService, TrainingService
from app.settings import Settings, tenants
from app.signing import UrlSigner
from app.stores.hub_cache import HubCache
from app.stores.objects import create
from app.stores.objects.accounts import AccountFiles
from app.stores.objects.archives import ArchiveFiles
from app.stores.objects.base import ObjectStore
from app.stores.objects.captures import CaptureFiles
from app.stores.objects.routes import RouteFiles
from app.stores.pages import PageFiles
from app.stores.redis.backlog import RedisBacklog, RedisCalls
from app.stores.redis.client import Waiter, connect, connect_state
from app.stores.redis.completions import RedisCompletions, TokenStreams
from app.stores.redis.durability import check_at_start
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import Pins, RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.pages import Ledgers, RedisPages
from app.stores.redis.records import RedisRecords
from app.stores.store_id import check_store_id
from app.suspension import SUSPENDED_A_THREAD
from app.tracing.tracer import Tracer
from app.tracing.tracer import create as create_tracer


@dataclass(frozen=True, slots=True)
class Services:
    """One instance of each service, shared by all threads of the process."""

    settings: Settings
    authenticator: Authenticator
    own_key: OwnKey
    administration: Administration
    oplog: RedisOpLog
    records: RedisRecords
    objects: ObjectStore
    bases: BaseModels
    dispatcher: Dispatcher
    admission: AdmissionService
    quotas: QuotaService
    sessions: SessionService
    session_search: SessionSearch
    traces: TraceService
    models: ModelService
    custom_losses: CustomLossService
    training: TrainingService
    sampling: SamplingService
    runs: RunService
    checkpoints: CheckpointService
    checkpoint_search: CheckpointSearch
    archives: ArchiveService
    copies: CopyService
    uploads: UploadService
    poll_limiter: LongPollLimiter
    polls: PollService
    batch_polls: BatchPollService
    queue_states: QueueStates
    queue: QueueService
    cancels: CancelService
    openai: OpenAiService
    captures: CaptureService
    hub: HubService
    audit: AuditService
    usage: UsageService
    tracer: Tracer | None

    def close(self) -> None:
        """Sends the task events and spans that wait, for a process that ends."""
        self.dispatcher.events.close()
        if self.tracer:
            self.tracer.flush()


def build(settings: Settings) -> Services:
    """Builds all services. Raises SetupError when the settings name no state server, or a server or an object store
    that cannot be used, or give tenants something that would have no effect."""
    tenants.check(settings)
    if not settings.redis.url:
        raise SetupError("redis.url is empty: set it, or start everything with `tinsmith up`")
    client, broker = connect_state(settings.redis.url), connect(settings.broker_url)
    check_at_start(client)
    objects = create(settings, may_be_away=True)
    oplog, records = RedisOpLog(client, settings.engine, objects), RedisRecords(client, settings.engine)
    check_store_id(settings, records, objects)
    lifecycle, calls = RedisLifecycle(client, settings.engine), RedisCalls(client)
    pages = RedisPages(client, settings.engine)
    ledgers, spending = Ledgers(pages, PageFiles(objects)), Spending(pages, settings.prices_of)
    signer = UrlSigner(settings.url_secret, settings.public_url)

    tokens = _tokens(settings)
    accounts = AccountService(AccountFiles(objects), records)
    recovery = AccountRecovery(accounts, records)
    authenticator = Authenticator(settings.api_keys, records, tokens, recovery, settings.operator_keys)
    sources = Sources(records, authenticator)
    limits = LimitsFinder(records, settings.limits.project)
    quotas = QuotaService(limits, RedisQuotas(client, settings.engine), spending)

    bases, hub_cache = BaseModels(settings, records), HubCache()
    dispatcher = Dispatcher(celery_app(settings))
    admission = AdmissionService(oplog, records, dispatcher, limits, settings, spending)
    teardown = Teardown(lifecycle, records, objects, dispatcher.wake)
    custom_losses = CustomLossService(records, quotas)
    routes = RouteService(records, oplog, RouteFiles(objects, records.now))
    sampling = SamplingService(records, bases, admission, quotas, settings.limits)
    samplers = Samplers(records, lifecycle, bases, sampling)
    captures = CaptureService(CaptureFiles(objects, settings.capture_secret, records.now), limits, records)
    importer = Importer(records, oplog, lifecycle, objects, quotas)

    futures, waiter = FutureFinder(oplog, records), Waiter(client, broker)
    poll_limiter, suspended = LongPollLimiter(settings.api), LongPollLimiter(settings.api, SUSPENDED_A_THREAD)
    polls = LongPolls(waiter, poll_limiter, suspended, authenticator.check)
    cancels = CancelService(futures, oplog)
    result_stream = ResultStream(
        futures, waiter, TokenStreams(broker), authenticator.check, samplers.keep_alive, cancels.cancel
    )
    backlog = RedisBacklog(client, settings.engine)
    snapshots = QueueSnapshots(bases, oplog, backlog, lambda project: limits.project(project).weight)
    queue_states = QueueStates(snapshots, records)
    by_project = settings.api.queue_metrics_by_project
    return Services(
        settings=settings,
        authenticator=authenticator,
        own_key=OwnKey(records, accounts, tokens),
        administration=Administration(accounts, records, recovery),
        oplog=oplog,
        records=records,
        objects=objects,
        bases=bases,
        dispatcher=dispatcher,
        admission=admission,
        quotas=quotas,
        sessions=SessionService(records, lifecycle, objects, teardown, quotas),
        session_search=SessionSearch(records),
        traces=TraceService(records, calls, signer),
        models=ModelService(records, bases, admission, teardown, sources),
        custom_losses=custom_losses,
        training=TrainingService(records, bases, admission, custom_losses, settings.limits, sources, routes),
        sampling=sampling,
        runs=RunService(records, quotas),
        checkpoints=CheckpointService(records, objects, quotas, Pins(oplog, lifecycle, records)),
        checkpoint_search=CheckpointSearch(records),
        archives=ArchiveService(records, ArchiveFiles(objects, settings.engine.free_disk_bytes), signer),
        copies=CopyService(records, oplog, lifecycle, objects, quotas, sources),
        uploads=UploadService(records, objects, bases, quotas, importer, settings.limits),
        poll_limiter=poll_limiter,
        polls=PollService(futures, polls, lifecycle.poll),
        batch_polls=BatchPollService(RedisCompletions(client, settings.engine), records, polls, lifecycle.poll),
        queue_states=queue_states,
        queue=QueueService(snapshots, queue_states, backlog, calls, records, bases, oplog, by_project=by_project),
        cancels=cancels,
        openai=OpenAiService(
            bases, samplers, admission, quotas, poll_limiter, result_stream, captures, settings.limits, hub_cache
        ),
        captures=captures,
        hub=HubService(settings, bases, hub_cache),
        audit=AuditService(ledgers, records),
        usage=UsageService(ledgers, records, settings.prices_of),
        tracer=create_tracer(settings.tracing, "tinsmith-api"),
    )


def _tokens(settings: Settings) -> Tokens | None:
    if not settings.api.pjwt_auth_enabled:
        return None
    if not settings.url_secret:
        raise SetupError("api.pjwt_auth_enabled needs url_secret in the config file: set it to 32 random characters")
    return Tokens(settings.url_secret, settings.api.token_lifetime_s)
