"""The settings of the API, its limits, the stores and the journal's engine."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from app.domain.limits import Limits
from app.settings.section import Section

SENTINEL_SCHEMES = ("redis+sentinel://", "rediss+sentinel://")
"""The second one has TLS."""
_SERVER_SCHEMES = ("redis://", "rediss://")


def netloc(host: str, port: int | str) -> str:
    """Host and port as in a URL, which has an IPv6 address in brackets. The host may have them already."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _is_of_a_server(url: str) -> bool:
    """True for a URL with a scheme of Redis and, if it has a port, a number for it."""
    try:
        return url.startswith(_SERVER_SCHEMES) and urlsplit(url).port != 0
    except ValueError:
        return False


class ApiSettings(Section):
    host: str = Field(
        "127.0.0.1", description="address on which the API listens; 0.0.0.0: all addresses of this machine"
    )
    port: int = Field(8000, ge=0, le=65535, description="port of the API")
    public_url: str = Field(
        "", description="URL of this server for clients, used in signed URLs; empty means http://host:port"
    )
    processes: int = Field(
        1, ge=1, le=64, description="API processes on the port; each has its own threads and its own poll_capacity"
    )
    poll_capacity: int = Field(
        1000,
        ge=1,
        description="calls that wait for results in a thread; five times as many polls are held without a thread, for "
        "poll_hold_s each; with more polls, each is held for less time",
    )
    poll_hold_s: float = Field(
        30.0, gt=0, description="longest time a poll is held; the SDK gives up on a poll after 45 s"
    )
    batch_polls: bool = Field(
        False, description="the SDK waits for all samples of a client in one poll, instead of one connection for each"
    )
    pjwt_auth_enabled: bool = Field(
        False, description="the SDK exchanges its key for a token and sends the token instead; needs url_secret"
    )
    token_lifetime_s: float = Field(
        3600.0, ge=300, description="time for which such a token is valid; the SDK renews it"
    )
    spare_threads: int = Field(200, ge=8, description="threads for all other calls, in addition to poll_capacity")
    max_body_bytes: int = Field(
        64 * 2**20, ge=1, description="largest body with a batch or a prompt, before and after decompression"
    )
    compress_batches: bool = Field(
        False, description="the SDK compresses batches with zstd: less to transfer, more to compute"
    )
    queue_metrics_by_project: bool = Field(
        False, description="the metrics of queue depth and age also have the label project"
    )
    tokenizers: Literal["auto", "served", "local"] = Field(
        "auto",
        description="served: clients load tokenizers from this server, by the Hub's routes and HF_ENDPOINT, under the "
        "model's name; local: these routes are not served, and get_info gives clients the folder to load from; auto: "
        "as served, but get_info gives the folder while only this machine can reach the API",
    )


class LimitSettings(Section):
    small_body_bytes: int = Field(
        2 * 2**20,
        ge=2**16,
        description="largest body without a batch or a prompt; max_body_bytes applies if it is lower",
    )
    json_values: int = Field(
        2**20,
        ge=1000,
        description="most values in a JSON body or in the datums of a protobuf batch; such a batch has at most a "
        "quarter as many datums, chunks and inputs, and a batch in JSON half of these",
    )
    json_depth: int = Field(64, ge=16, le=256, description="deepest nesting of lists and objects in a JSON body")
    datums: int = Field(8192, ge=1, description="most datums in one call; the SDK sends 1,024 at a time")
    batch_tokens: int = Field(2**22, ge=1, description="most tokens in all datums of one call")
    samples: int = Field(1024, ge=1, le=1024, description="most samples of one call (num_samples)")
    sampled_tokens: int = Field(
        2**24,
        ge=1,
        description="most tokens that one call may sample (num_samples * max_tokens); a larger call gets 400",
    )
    project: Limits = Field(Limits(), description="default limits of a project; `tinsmith admin` sets others")


class StoreSettings(Section):
    url: str = Field(
        "", description="file:///folder, or http(s)://host:port/bucket of an S3 server; empty: data_dir/objects"
    )
    public_url: str = Field("", description="URL of the store for clients, used in signed S3 URLs; empty means url")
    access_key: str = Field("", repr=False, description="access key of an S3 server")
    secret_key: str = Field("", repr=False, description="secret key of an S3 server")
    region: str = Field("us-east-1", description="region of an S3 server")


class RedisSettings(Section):
    url: str = Field(
        "",
        repr=False,
        description="state server: journal and futures; empty starts an embedded Valkey in data_dir; "
        f"{SENTINEL_SCHEMES[0]}host:port,host:port,host:port/service finds the primary through these sentinels",
    )
    broker_url: str = Field(
        "",
        repr=False,
        validate_default=True,
        description="server for Celery messages and streamed tokens, beside redis.url; empty means the next database "
        "of that server (1 after 0); required if redis.url names sentinels; without redis.url, `tinsmith up` always "
        "starts a second embedded Valkey for them",
    )

    @field_validator("url", "broker_url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        if url and not url.startswith(SENTINEL_SCHEMES) and not _is_of_a_server(url):
            raise ValueError("give the URL of a Redis server, such as redis://host:6379/0, with rediss:// for TLS")
        return url

    @field_validator("broker_url")
    @classmethod
    def _is_one_server(cls, broker_url: str, info: ValidationInfo) -> str:
        url = broker_url or str(info.data.get("url", ""))
        if url.startswith(SENTINEL_SCHEMES):
            raise ValueError("the broker is one Redis server, which no sentinels watch: set it to redis://host:port/0")
        return broker_url


class TracingSettings(Section):
    endpoint: str = Field(
        "",
        repr=False,
        description="OpenTelemetry collector that takes OTLP over HTTP, such as http://127.0.0.1:4318; empty sends no "
        "traces; needs the extra `tracing`",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str) -> str:
        if endpoint and not (endpoint.startswith(("http://", "https://")) and urlsplit(endpoint).hostname):
            raise ValueError("give a URL that begins with http:// or https:// and names a host")
        return endpoint


class EngineSettings(Section):
    lease_s: float = Field(
        15.0, gt=0, description="an owner that does not renew its leases for this long loses its models"
    )
    replicas: int = Field(
        0,
        ge=0,
        description="replicas of the state server that must have a call before it is acknowledged, and a result before "
        "a client can read it; with 0 a failover may lose the newest ones",
    )
    gap_s: float = Field(
        330.0, gt=0, description="a missing seq is given up after this time; the SDK itself retries for 300 s"
    )
    healthy_s: float = Field(
        30.0,
        gt=0,
        description="a worker that handles none of its tasks for this long is not ready; after twice this time it ends",
    )
    idle_s: float = Field(600.0, gt=0, description="a trainer unloads a model that is not used for this long")
    ring_again_s: float = Field(
        10.0,
        gt=0,
        description="a waiting Op is dispatched again after this time, and a running one after six times as long; each "
        "repeat doubles the time, up to 60 s (running: 360 s)",
    )
    snapshot_share: float = Field(0.02, gt=0, le=1, description="largest share of a trainer's time spent on snapshots")
    journal_bytes: int = Field(
        256 * 2**20,
        ge=0,
        description="a model gets a snapshot after this many bytes in its journal, whatever snapshot_share says",
    )
    handover_dir: str = Field(
        "",
        description="folder for new weights on their way to samplers on the same machine; empty: a folder in shared "
        "memory",
    )
    handover_bytes: int = Field(
        2 * 2**30,
        ge=0,
        description="most bytes in that folder, which also leaves half of its file system to others, at least 256 "
        "and at most 512 MiB; weights that do not fit are uploaded before they can be sampled",
    )
    payload_budget_bytes: int = Field(
        512 * 2**20, ge=1, description="most bytes of calls kept in Redis to run or replay; further calls get 503"
    )
    memory_share: float = Field(
        0.8, gt=0, le=1, description="above this share of the state server's maxmemory, new calls get 503"
    )
    free_disk_bytes: int = Field(
        2**29,
        ge=0,
        description="with less free space on the disk of data_dir or of a folder store, new calls get 503, the store "
        "takes no files and the disk no saves, snapshots and fetched checkpoints; archives leave it free on the disk "
        "of temporary files; 0: no such bound",
    )
    spill_bytes: int = Field(
        8 * 2**20,
        ge=4096,
        description="larger calls move to the object store; smaller ones only when half of payload_budget_bytes is "
        "used",
    )
    result_spill_bytes: int = Field(
        2**18, ge=4096, description="larger results move to the object store within seconds"
    )
    result_budget_bytes: int = Field(
        2**32, ge=1, description="most bytes of such results kept for one project; above this its further calls get 503"
    )
    session_s: float = Field(600.0, gt=0, description="a session without heartbeat, poll or call for this long expires")
    retain_s: float = Field(
        7 * 86_400.0,
        gt=0,
        description="a run's journal, snapshots and samplers are kept for this long after its session",
    )
    ephemeral_adapters: int = Field(
        8, ge=1, description="number of newest adapters that are kept of each run's saves without a path"
    )
    ephemeral_s: float = Field(
        7_200.0, gt=0, description="older adapters are kept for this long after their save or last request"
    )
    orphan_s: float = Field(86_400.0, gt=0, description="stored files without a reference are deleted after this time")
    result_unread_s: int = Field(
        86_400,
        ge=1,
        description="time for which an unread result is kept, and, for two days at least, the sampling session of an "
        "adapter that was deleted",
    )
    result_read_s: int = Field(3_600, ge=1, description="time for which a small result is kept after its first read")
