"""Panels of the dashboard: the queries, and the words beside them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression, and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph over time. `unit` is one of Grafana's."""

    title: str
    unit: str
    about: str
    queries: tuple[Query, ...]


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}[$__rate_interval]))"


def _slowest(histogram: str, by: str = "") -> str:
    """The 95th percentile."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile(0.95, {_rate(f'{histogram}_bucket', labels)})"


def _events(counter: str, by: str) -> str:
    """The events of five minutes. A series begins with its first event, which is no increase, so its value counts. It
    does not begin again after scrapes that failed for up to ten minutes."""
    earlier = f"last_over_time({counter}[10m] offset 5m)"
    return f"sum by ({by}) (({counter} unless {earlier}) or increase({counter}[5m])) or vector(0)"


ROWS: dict[str, tuple[Graph, ...]] = {
    "Calls": (
        Graph(
            "Requests",
            "reqps",
            "Answers a second by status.",
            (Query(_rate("tinsmith_request_seconds_count", "status"), "{{status}}"),),
        ),
        Graph(
            "Errors",
            "short",
            "Requests answered with an error within five minutes, by the error's kind.",
            (Query(_events("tinsmith_errors_total", "status, error"), "{{status}} {{error}}"),),
        ),
        Graph(
            "Slowest requests",
            "s",
            "95th percentile of the time to answer, of the five slowest routes.",
            (Query(f"topk(5, {_slowest('tinsmith_request_seconds', 'route')})", "{{route}}"),),
        ),
        Graph(
            "Stages of a call",
            "s",
            "Mean time of a call in each stage, from its admission to the poll that takes the result.",
            (
                Query(
                    "sum(rate(tinsmith_admit_seconds_sum[$__rate_interval])) "
                    "/ sum(rate(tinsmith_admit_seconds_count[$__rate_interval]))",
                    "admit",
                ),
                Query(
                    f"{_rate('tinsmith_op_stage_seconds_sum', 'stage')} "
                    f"/ {_rate('tinsmith_op_stage_seconds_count', 'stage')}",
                    "{{stage}}",
                ),
                Query(
                    "sum(rate(tinsmith_poll_seconds_sum[$__rate_interval])) "
                    "/ sum(rate(tinsmith_poll_seconds_count[$__rate_interval]))",
                    "poll",
                ),
            ),
        ),
        Graph(
            "Slowest stages by kind",
            "s",
            "95th percentile of the time of each kind of call in each stage.",
            (
                Query(_slowest("tinsmith_admit_seconds", "kind"), "{{kind}} admit"),
                Query(_slowest("tinsmith_op_stage_seconds", "kind, stage"), "{{kind}} {{stage}}"),
            ),
        ),
        Graph("Held polls", "short", "Polls that wait for a result.", (Query("sum(tinsmith_held_polls)", "polls"),)),
    ),
    "Queues": (
        Graph(
            "Waiting",
            "short",
            "Models and sampling requests that wait, by queue; at most 1,000 are counted.",
            (Query("max by (queue) (tinsmith_queue_depth) or vector(0)", "{{queue}}"),),
        ),
        Graph(
            "Oldest waiting",
            "s",
            "Longest time without progress, by queue.",
            (Query("max by (queue) (tinsmith_queue_age_seconds) or vector(0)", "{{queue}}"),),
        ),
        Graph(
            "Backlog",
            "short",
            "Models and sampling requests that need a worker of a role; an autoscaler starts workers by it.",
            (Query("max by (base_model, role) (tinsmith_backlog)", "{{role}} {{base_model}}"),),
        ),
        Graph(
            "Oldest of the backlog",
            "s",
            "Longest time without progress, by base model and role.",
            (Query("max by (base_model, role) (tinsmith_backlog_age_seconds)", "{{role}} {{base_model}}"),),
        ),
        Graph(
            "Admitted and finished",
            "ops",
            "Calls that are admitted and Ops that finish, a second.",
            (
                Query(_rate("tinsmith_admissions_total", "kind"), "{{kind}} admitted"),
                Query(_rate("tinsmith_ops_total", "kind, state"), "{{kind}} {{state}}"),
            ),
        ),
    ),
    "Throughput": (
        Graph(
            "Tokens",
            "short",
            "Tokens a second by their use.",
            (Query(_rate("tinsmith_tokens_total", "use"), "{{use}}"),),
        ),
        Graph(
            "Prompt cache",
            "percentunit",
            "Share of the prompts' tokens that needed no prefill.",
            (
                Query(
                    'sum(rate(tinsmith_tokens_total{use="cached"}[$__rate_interval])) '
                    '/ sum(rate(tinsmith_tokens_total{use="prompt"}[$__rate_interval]))',
                    "cached",
                ),
            ),
        ),
        Graph(
            "Ops in a pass",
            "short",
            "Mean number of models that share a pass.",
            (
                Query(
                    f"{_rate('tinsmith_pass_ops_sum', 'instance')} / {_rate('tinsmith_pass_ops_count', 'instance')}",
                    "{{instance}}",
                ),
            ),
        ),
        Graph(
            "Batch",
            "short",
            "Sequences in each sampler's engine, those that fit, and requests that wait for a place.",
            (
                Query("tinsmith_batch_sequences", "{{instance}} running"),
                Query("tinsmith_batch_capacity", "{{instance}} capacity"),
                Query("tinsmith_batch_waiting", "{{instance}} waiting"),
            ),
        ),
        Graph(
            "Adapters",
            "short",
            "Adapters in each sampler's engine.",
            (Query("tinsmith_loaded_adapters", "{{instance}}"),),
        ),
        Graph(
            "Adapter cache",
            "reqps",
            "Requests whose adapter was in the engine (hit) or was loaded (miss).",
            (Query(_rate("tinsmith_adapter_uses_total", "cache"), "{{cache}}"),),
        ),
    ),
    "Faults and recovery": (
        Graph(
            "Attempts lost",
            "short",
            "Attempts that ended with their worker or broke it, and calls given up after three, within five minutes.",
            (
                Query(_events("tinsmith_lost_attempts_total", "kind"), "{{kind}} lost"),
                Query(_events("tinsmith_given_up_ops_total", "kind"), "{{kind}} given up"),
            ),
        ),
        Graph(
            "Ownership lost",
            "short",
            "Leases found gone and commits refused, within five minutes.",
            (
                Query("sum(increase(tinsmith_lost_leases_total[5m]))", "leases lost"),
                Query("sum(increase(tinsmith_refused_commits_total[5m]))", "commits refused"),
            ),
        ),
        Graph(
            "Restores",
            "s",
            "95th percentile of the time to restore a model.",
            (Query(_slowest("tinsmith_restore_seconds"), "restore"),),
        ),
        Graph(
            "Replayed",
            "ops",
            "Ops a second that restores run again.",
            (Query(_rate("tinsmith_replayed_ops_total", "instance"), "{{instance}}"),),
        ),
        Graph(
            "Changes without a snapshot",
            "s",
            "Longest time for which changes of a model are in no durable snapshot.",
            (Query("tinsmith_snapshot_age_seconds", "{{instance}}"),),
        ),
        Graph(
            "Models", "short", "Models that each trainer owns.", (Query("tinsmith_resident_models", "{{instance}}"),)
        ),
    ),
    "Machines": (
        Graph(
            "Object store",
            "s",
            "95th percentile of the time of a call, by operation.",
            (Query(_slowest("tinsmith_object_store_seconds", "operation"), "{{operation}}"),),
        ),
        Graph(
            "Object store outages",
            "short",
            "Calls that failed because the store was away or full, within five minutes.",
            (Query("sum by (instance) (increase(tinsmith_object_store_outages_total[5m]))", "{{instance}}"),),
        ),
        Graph(
            "GPU memory",
            "bytes",
            "Memory in use on each GPU, and the memory it has.",
            (
                Query("max by (instance, gpu) (tinsmith_gpu_memory_used_bytes)", "{{instance}} GPU {{gpu}} used"),
                Query("max by (instance, gpu) (tinsmith_gpu_memory_bytes)", "{{instance}} GPU {{gpu}}"),
            ),
        ),
        Graph(
            "GPU utilization",
            "percentunit",
            "Share of the time in which a kernel ran.",
            (Query("max by (instance, gpu) (tinsmith_gpu_utilization_ratio)", "{{instance}} GPU {{gpu}}"),),
        ),
    ),
}
