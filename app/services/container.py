"""Builds every service that the routes use, once per process."""

from __future__ import annotations

from dataclasses import dataclass

from app.dispatch import Dispatcher, celery_app
from app.errors import SetupError
from app.services.admission import AdmissionService, LimitsOf, QuotaService
from app.services.base_models import BaseModels
from app.services.checkpoints import ArchiveService, CheckpointSearch, CheckpointService, CopyService
from app.services.hub import HubService
from app.services.imports.importer import Importer
from app.services.imports.uploads import UploadService
from app.services.models import ModelService, RunService
from app.services.openai.service import OpenAiService, Samplers
from app.services.openai.streaming import ResultStream
from app.services.polling import BatchPollService, CancelService, FutureFinder, LongPollLimiter, LongPolls, PollService
from app.services.queue import QueueService, QueueSnapshots, QueueStates
from app.services.sampling import SamplingService
from app.services.sessions import SessionSearch, SessionService, TraceService
from app.services.teardown import Teardown
from app.services.tenants.access import Authenticator, OwnKey, Sources, Tokens
from app.services.tenants.accounts import AccountRecovery, AccountService
from app.services.tenants.audit import AuditService
from app.services.tenants.usage import UsageService
from app.services.training import CustomLossService, RouteService, TrainingService
from app.settings import Settings
from app.signing import UrlSigner
from app.stores.objects import create
from app.stores.objects.accounts import AccountFiles
from app.stores.objects.base import ObjectStore
from app.stores.objects.routes import RouteFiles
from app.stores.pages import PageFiles
from app.stores.redis.backlog import RedisBacklog, RedisCalls
from app.stores.redis.client import Waiter, connect, connect_state
from app.stores.redis.completions import RedisCompletions, TokenStreams
from app.stores.redis.durability import check_at_start
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.pages import RedisPages, UsageLedger
from app.stores.redis.records import RedisRecords
from app.suspension import SUSPENDED_A_THREAD


@dataclass(frozen=True, slots=True)
class Services:
    """One instance of each service, shared by all threads of the process."""

    settings: Settings
    authenticator: Authenticator
    own_key: OwnKey
    oplog: RedisOpLog
    records: RedisRecords
    objects: ObjectStore
    bases: BaseModels
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
    polls: PollService
    batch_polls: BatchPollService
    queue_states: QueueStates
    queue: QueueService
    cancels: CancelService
    openai: OpenAiService
    hub: HubService
    audit: AuditService
    usage: UsageService


def build(settings: Settings) -> Services:
    """Builds all services. Raises SetupError when the settings name no state server, or a server or an object store
    that cannot be used."""
    if not settings.redis.url:
        raise SetupError("redis.url is empty: set it, or start everything with `tinsmith up`")
    client, broker = connect_state(settings.redis.url), connect(settings.broker_url)
    check_at_start(client)
    objects = create(settings, may_be_away=True)
    oplog, store = RedisOpLog(client, settings.engine, objects), RedisRecords(client, settings.engine)
    bases = BaseModels(settings, store)
    dispatcher = Dispatcher(celery_app(settings))
    limits = LimitsOf(store, settings.limits.project)
    quotas = QuotaService(limits, RedisQuotas(client, settings.engine))
    admission = AdmissionService(oplog, store, dispatcher, limits, settings)
    lifecycle = RedisLifecycle(client, settings.engine)
    custom_losses = CustomLossService(store, quotas)
    futures, waiter, poll_limiter = FutureFinder(oplog, store), Waiter(client, broker), LongPollLimiter(settings.api)
    teardown = Teardown(lifecycle, store, objects, dispatcher.wake)
    sampling = SamplingService(store, bases, admission, quotas, settings.limits)
    cancels = CancelService(futures, oplog)
    samplers = Samplers(store, lifecycle, bases, sampling)
    ledger = UsageLedger(RedisPages(client, settings.engine), PageFiles(objects))
    backlog, calls = RedisBacklog(client, settings.engine), RedisCalls(client)
    snapshots = QueueSnapshots(bases, oplog, backlog, lambda project: limits.project(project).weight)
    queue_states = QueueStates(snapshots, store)
    tokens = _tokens(settings)
    accounts = AccountService(AccountFiles(objects), store)
    authenticator = Authenticator(settings.api_keys, store, tokens, AccountRecovery(accounts, store))
    suspended = LongPollLimiter(settings.api, SUSPENDED_A_THREAD)
    polls = LongPolls(waiter, poll_limiter, suspended, authenticator.check)
    sources = Sources(store, authenticator)
    result_stream = ResultStream(
        futures, waiter, TokenStreams(broker), authenticator.check, samplers.keep_alive, cancels.cancel
    )
    importer = Importer(store, oplog, lifecycle, objects, quotas)
    routes = RouteService(store, oplog, RouteFiles(objects, store.now))
    signer = UrlSigner(settings.url_secret, settings.public_url)
    return Services(
        settings,
        authenticator,
        OwnKey(store, accounts, tokens),
        oplog,
        store,
        objects,
        bases,
        admission,
        quotas,
        SessionService(store, lifecycle, objects, teardown, quotas),
        SessionSearch(store),
        TraceService(store, calls, signer),
        ModelService(store, bases, admission, teardown, sources),
        custom_losses,
        TrainingService(store, bases, admission, custom_losses, settings.limits, sources, routes),
        sampling,
        RunService(store),
        CheckpointService(store, objects, quotas),
        CheckpointSearch(store),
        ArchiveService(store, objects, signer),
        CopyService(store, oplog, lifecycle, objects, quotas, sources),
        UploadService(store, objects, bases, quotas, importer, settings.limits),
        PollService(futures, polls, lifecycle.poll),
        BatchPollService(RedisCompletions(client, settings.engine), store, polls, lifecycle.poll),
        queue_states,
        QueueService(snapshots, queue_states, backlog, calls, store),
        cancels,
        OpenAiService(bases, samplers, admission, poll_limiter, result_stream, settings.limits),
        HubService(settings, bases),
        AuditService(ledger, store),
        UsageService(ledger, store),
    )


def _tokens(settings: Settings) -> Tokens | None:
    if not settings.api.pjwt_auth_enabled:
        return None
    if not settings.url_secret:
        raise SetupError("api.pjwt_auth_enabled needs url_secret in the config file: set it to 32 random characters")
    return Tokens(settings.url_secret, settings.api.token_lifetime_s)
