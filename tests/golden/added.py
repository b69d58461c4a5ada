"""Additions and deliberate changes since ecb7b39. Nothing else may differ from that commit.

To add to a contract, list the new name here, with today's value if there was another. Stored forms (codec, names,
scripts) may only gain values of new kinds, because other versions read the existing ones.
"""

from __future__ import annotations

from typing import Any

_DTYPES = ["auto", "float32", "bfloat16", "nf4", "int8", "fp8"]
_GPUS = {"items": {"minimum": 0, "type": "integer"}, "type": "array"}
_DEVICES = {"anyOf": [_GPUS, {"items": {**_GPUS, "minItems": 1}, "type": "array"}], "default": []}
_COUNT = {"default": 1, "minimum": 0, "type": "integer"}
_WORKERS = ("trainer", "full", "sampler", "full_sampler")
_OR_AUTO = {"anyOf": [{"type": "boolean"}, {"const": "auto", "type": "string"}], "default": "auto"}
_NUMBER_OR_AUTO = {
    "anyOf": [{"exclusiveMinimum": 0, "type": "integer"}, {"const": "auto", "type": "string"}],
    "default": "auto",
}
_CONCURRENCY = {"default": 1024, "minimum": 1, "type": "integer"}
_PORT = {"default": 0, "maximum": 65535, "minimum": 0, "type": "integer"}
_CHOSEN = {"default": 0, "minimum": 0, "type": "integer"}

CHANGED: dict[str, dict[str, Any]] = {
    # It was any text, also one that the SDK takes for no key. It is the digest of another text now.
    "environment": {
        "TINSMITH_API_KEY": {"api_keys[0]": "81a3c728f103e01fa315b5807cbbefff08148d8b1157e6c89602e14cbb20093f"},
    },
    # A negative index was accepted, and failed when the worker started; each copy can have a list of its own, and
    # there can be none. The cookbook's greatest default rank is 128. A frozen base can have 4 or 8 bits.
    "settings": {
        **{f"base_models.{section}.devices": _DEVICES for section in _WORKERS},
        **{f"base_models.{section}.count": _COUNT for section in _WORKERS},
        "base_models.max_rank": {"default": 128, "minimum": 1, "type": "integer"},
        "base_models.dtype": {"default": "auto", "enum": _DTYPES, "type": "string"},
        # It was false, and a long datum ran out of memory.
        **{f"base_models.{section}.activation_checkpointing": _OR_AUTO for section in ("trainer", "full")},
        # A port that does not exist ended the worker when it had loaded its model.
        **{f"base_models.{section}.metrics_port": _PORT for section in _WORKERS},
        # It was 64; 0 chooses by the GPU.
        **{f"base_models.{section}.max_batch": _CHOSEN for section in ("sampler", "full_sampler")},
        # It was 256, which fills no batch of an H100 with requests for one sample.
        **{f"base_models.{section}.concurrency": _CONCURRENCY for section in ("sampler", "full_sampler")},
        # It was 1024, which keeps no GPU busy.
        **{f"base_models.{section}.micro_batch_tokens": _NUMBER_OR_AUTO for section in ("trainer", "full")},
        # It was 8192, which filled no micro-batch of a narrow model on a GPU.
        **{f"base_models.{section}.merged_tokens": _NUMBER_OR_AUTO for section in ("trainer", "full")},
    },
    "setting values": {
        "base_models[0].max_rank": 128,
        **{f"base_models[0].{section}.activation_checkpointing": "auto" for section in ("trainer", "full")},
        **{f"base_models[0].{section}.micro_batch_tokens": "auto" for section in ("trainer", "full")},
        **{f"base_models[0].{section}.merged_tokens": "auto" for section in ("trainer", "full")},
        **{f"base_models[0].{section}.max_batch": 0 for section in ("sampler", "full_sampler")},
        **{f"base_models[0].{section}.concurrency": 1024 for section in ("sampler", "full_sampler")},
    },
    # A checkpoint's answer also has its base model; a served model's has what adapters cover, and who refuses it.
    "openapi": {
        "schemas SupportedModel": "d352ee6a441b8c29f40aa100a14b936fa25228e82294c52f706e649925f55d35",
        "schemas Sample": "b37fc481701bad27554f6e75c5a1ab2021592e0e4ee7b5f09630e0205c5a278a",
        # The limits live_sessions and monthly_budget, with their use, checkpoint_ttl_s, keep_checkpoints and
        # capture_days.
        "schemas _Limits": "f9660b8c1d8dc03d49efe005b6c36b80db989395af9e6bd5882c2b0cc33a5da2",
        "schemas _Used": "a882803e505673c13d7d75a1f53cfc5cfd1d9c242185b5beea5745d878d623bb",
        # Costs and rates, and the name of the user.
        "schemas Storage": "b1e826b21c4d8414e39bdafc4d36ed36e8f7a761580dd432dc76b3551770098e",
        "schemas StorageItem": "6e808e488a87d9cd1bfbb81a0733886fb1d37530baecd3e05c52528c8f6cb5ec",
        "schemas UsageEvent": "1dba5283c9dea351fbb0beca32ea0f53fe97cee3dd9acdedc79ba52d92a5ab76",
        # The size of the SDK's chunks of a batch.
        "schemas ClientConfig": "7af2017141f647236de2e8459eda44ff06e6362eb4c9f1b299d3f700815a87e9",
        # A recipient can be an SSH key.
        "schemas SaveWeightsExternal": "6ecfe4041b6cd761869bc3514bbb15653f07d2c6f5bdd6898f61c55f740ae221",
        # A number that becomes part of an id has at most nine digits, and a load's numbers have bounds.
        "schemas CreateSamplingSession": "b1735778c23c06f5c985e9699b7a3cff0b35d7bdaf864d09e458f04dea47cc46",
        "schemas LoadWeights": "3e0b8eaca4e120410a159bf92a70ae9c89b841dd815aa57f8b6b202decabc895",
        "schemas SaveWeightsForSampler": "353cd4ccc4b0bfadc90d7776c75c735484cc834768786dc09b3ba7b3d6f6249d",
        # An unknown field is refused.
        "schemas LoraConfig": "d68509e3164670cdcc2713a5b7ee600249a6929c81dc4df2ed07691200c8d43d",
        "schemas Adam": "50b2ca46332a2cc39d9501eb56f510127d141c95a13a4be0dafca3f7e111a3d8",
        # A message can have the fields reasoning, parsed, and function_call with null.
        "schemas Message": "74f98650beaf5085596b8a31ecaa5b1a90c272411cfbd957008d83eb95a86a18",
        # Its project.
        "schemas TrainingRun": "6e56c93d1a9c231e831323c096440f070d36d07d481cc3e502d0967db726308d",
        # Both can ask for token ids and top_k, and have neutral values of min_p and repetition_penalty.
        "schemas Completion": "6b9b3477921de060f690209572b8889ecd547c34e551fe2fce13e99ea761d516",
        # parallel_tool_calls can be false, response_format a JSON schema; chat_template_kwargs, reasoning_effort,
        # separate_reasoning.
        "schemas ChatCompletion": "6b8281bf2201ffc3cb5959c17e408992174c9a728773d57abe715ae36da2da29",
        # Their answers in JSON are described, with an example.
        "post /api/v1/retrieve_future": "d2fd7fe87ee6012cda53fe44333725649f6c0e2ecf00daaf559e9647d7746c8d",
        "post /oai/api/v1/chat/completions": "abd5990d5f58a47caa0083cb968475addef6a51177cfaf8c732c90ff35081377",
        "post /oai/api/v1/completions": "3da9c8db7e6407f3f5e348cfd4cb23dd0669169ebecdbe81f6c817d7f10b3a31",
        "schemas Checkpoint": "e84a265c8f99dde1a6ef60d3716015d2da09d885e191024ca437442c50198981",
    },
}
# Phrases of messages, then and today. A message is not a stored form; the result of a failed call is.
REWORDED = {
    "no model 'other:train:0'": "model 'other:train:0' does not exist",
    "shows what holds and what is used": "shows the limits and their use",
    "sampler.queue_requests lets in": "sampler.queue_requests allows",
    "session:train:0 handed over what only its journal up to seq 3 can make again": "the journal of session:train:0 up "
    "to seq 3 is still needed: only it can rebuild an adapter that is not uploaded yet",
    "seq 0 is not for epoch 1 to commit": "seq 0 cannot be committed under epoch 1: another worker owns the model, or "
    "another seq is next",
    "snapshot at seq 2 is not for epoch 1 to set": "snapshot at seq 2 cannot be set under epoch 1: another worker owns "
    "the model, or it has a newer snapshot",
}
_ENGINE = (
    *("free_disk_bytes", "result_spill_bytes", "result_budget_bytes", "ephemeral_adapters", "ephemeral_s"),
    "replicas",
)
_OF_IMPORT = {
    f"tinsmith import {option}"
    for option in ("-h/--help", "--base-model", "--project", "--config", "--data-dir", "--redis", "--s3")
}
_STACK = ("-h/--help", "--config", "--data-dir", "--redis", "--s3")
_PRICES = ("training", "prefill", "cached_prefill", "sampling", "device_hour", "gb_month")
_SEEN = {
    *(f"tinsmith admin usage {option}" for option in (*_STACK, "project", "--month")),
    *(f"tinsmith completion {option}" for option in ("-h/--help", "shell")),
    *(f"tinsmith models {option}" for option in (*_STACK[:3], "--json", "add -h/--help", "add hub_id", "add --json")),
    *(f"tinsmith init {option}" for option in ("-h/--help", "file", "--model", "--force", "--json")),
    *(f"tinsmith flower {option}" for option in (*_STACK[:3], "--address", "--port")),
    *(f"tinsmith status {option}" for option in (*_STACK, "--json", "--runs")),
    *(f"tinsmith top {option}" for option in (*_STACK, "--runs")),
    *(f"tinsmith doctor {option}" for option in (*_STACK, "--json")),
    *(f"tinsmith cancel {option}" for option in (*_STACK, "--json", "--yes", "target")),
    *(f"tinsmith logs {option}" for option in (*_STACK, "--json", "request_id")),
}
_WORKER_METRICS = (
    *("lost_attempts", "given_up_ops", "lost_leases", "restore_seconds", "replayed_ops", "snapshot_age_seconds"),
    *("loaded_adapters", "adapter_uses", "batch_sequences", "batch_capacity", "batch_waiting"),
    *("gpu_memory_used_bytes", "gpu_memory_bytes", "gpu_utilization_ratio"),
)
ADDED: dict[str, set[str]] = {
    "metrics": {
        *(f"{where}: tinsmith_object_store_{name}" for where in ("api", "worker") for name in ("seconds", "outages")),
        *(f"api: tinsmith_{name}" for name in ("admit_seconds", "poll_seconds", "errors")),
        *("api: tinsmith_backlog", "api: tinsmith_backlog_age_seconds"),
        *(f"worker: tinsmith_{name}" for name in _WORKER_METRICS),
    },
    "openapi": {
        "get /anthropic/api/v1/models",
        "get /anthropic/api/v1/models/{model}",
        "get /api/v1/billing/usage/runs",
        "get /api/v1/captures",
        "delete /api/v1/captures",
        "get /api/v1/public_archives/{run}/{kind}/{name}",
        "get /oai/api/v1/models/{model}",
        "parameters /anthropic/api/v1/models/{model}",
        "parameters /api/v1/public_archives/{run}/{kind}/{name}",
        "parameters /api/v1/uploads/{most_bytes}/{key}",
        "parameters /oai/api/v1/models/{model}",
        "post /anthropic/api/v1/messages",
        "post /anthropic/api/v1/messages/count_tokens",
        "post /api/v1/checkpoints/search",
        "post /api/v1/external_weights_upload_finish",
        "post /api/v1/external_weights_upload_start",
        "put /api/v1/uploads/{most_bytes}/{key}",
        "schemas Capture",
        "schemas Captures",
        "schemas CheckpointCursor",
        "schemas CheckpointsFound",
        "schemas Conversation",
        "schemas CreateMessage",
        "schemas Deleted",
        "schemas FinishUpload",
        "schemas NamedFormat",
        "schemas NextCheckpoint",
        "schemas RunUsage",
        "schemas RunsUsed",
        "schemas OutputConfig",
        "schemas OutputFormat",
        "schemas ResponseFormat",
        "schemas SearchCheckpoints",
        "schemas StartUpload",
        "schemas Thinking",
        "schemas Tool",
        "schemas ToolChoice",
        "schemas Turn",
        "schemas UploadStarted",
        "securitySchemes key",
    },
    "command line": {
        *(
            "tinsmith --version",
            "tinsmith up --quiet",
            "tinsmith import folder",
            "tinsmith admin limits set --checkpoint-ttl-s",
            "tinsmith admin limits set --keep-checkpoints",
            "tinsmith admin limits set --capture-days",
            "tinsmith admin limits set --live-sessions",
            "tinsmith admin limits set --monthly-budget",
        ),
        *(f"python -m workers.{worker} --copy" for worker in ("trainer", "sampler")),
        *_OF_IMPORT,
        *_SEEN,
    },
    "codec": {"Image"},
    "environment": {
        *("TINSMITH_METRICS_PORT", "TINSMITH_URL_SECRET", "TINSMITH_CAPTURE_SECRET", "TINSMITH_OPERATOR_KEY"),
        "TINSMITH_VLLM_START_ERROR",
    },
    "settings": {
        "api.processes",
        "api.queue_metrics_by_project",
        "operator_keys",
        *("tracing.endpoint", "tracing.<others>", "tracing.<required>"),
        "limits.project.checkpoint_ttl_s",
        "limits.project.keep_checkpoints",
        "limits.project.capture_days",
        "capture_secret",
        "limits.project.live_sessions",
        "limits.project.monthly_budget",
        "limits.samples",
        "limits.sampled_tokens",
        "base_models.router_replay",
        "base_models.weights_id",
        *(
            f"{section}.{name}"
            for section in ("prices", "base_models.prices")
            for name in (*_PRICES, "<others>", "<required>")
        ),
        *(f"engine.{name}" for name in _ENGINE),
        *(f"base_models.{section}.sequence_parallel" for section in ("trainer", "full")),
        *(f"base_models.{section}.tensor_parallel" for section in ("trainer", "full")),
        *(f"base_models.{section}.fused_kernels" for section in ("trainer", "full")),
        *(f"base_models.{section}.sleep" for section in ("sampler", "full_sampler")),
    },
    "setting values": {
        "api.processes",
        "api.queue_metrics_by_project",
        "operator_keys",
        "tracing.endpoint",
        "limits.project.checkpoint_ttl_s",
        "limits.project.keep_checkpoints",
        "limits.project.capture_days",
        "capture_secret",
        "limits.project.live_sessions",
        "limits.project.monthly_budget",
        "limits.samples",
        "limits.sampled_tokens",
        "base_models[0].router_replay",
        "base_models[0].weights_id",
        *(f"{section}.{name}" for section in ("prices", "base_models[0].prices") for name in _PRICES),
        *(f"engine.{name}" for name in _ENGINE),
        *(f"base_models[0].{section}.sequence_parallel" for section in ("trainer", "full")),
        *(f"base_models[0].{section}.tensor_parallel" for section in ("trainer", "full")),
        *(f"base_models[0].{section}.fused_kernels" for section in ("trainer", "full")),
        *(f"base_models[0].{section}.sleep" for section in ("sampler", "full_sampler")),
    },
    # Keys that start so. Processes of ecb7b39 neither read nor write them, which RedisRecords expects of its lists.
    "keys left behind": {
        *("tinsmith:checkpoints_of:", "tinsmith:calls_taken"),
        *("tinsmith:models_of:", "tinsmith:model_owners"),
        *("tinsmith:sessions_of:", "tinsmith:session_owners", "tinsmith:sessions_live:"),
        *("tinsmith:samplers_used", "tinsmith:ended_samplers:", "tinsmith:earlier_api"),
        *("tinsmith:progress:", "tinsmith:recorded:", "tinsmith:month:", "tinsmith:revoked", "tinsmith:off"),
    },
    # Keys that ecb7b39 writes only to note that it made lists which it finds made.
    "keys gone": {"tinsmith:runs_listed"},
    # Fields of a record that ecb7b39 does not need, with their values, by the beginning of the record's key.
    "record fields": {
        "tinsmith:checkpoints:": {"expiry_by": '""'},
        "tinsmith:keys:": {"only_project": "false"},
        "tinsmith:models:": {"user": '""'},
        "tinsmith:sessions:": {"detail": '""'},
        "tinsmith:page:usage/": {"run training session:train:0 base": "5"},
    },
    # Values by key, today and then, where ecb7b39 only asks whether the key exists.
    "values": {"tinsmith:taking_calls": ("pieces", "")},
    # Keys that start so and are now deleted before they expire; every version does without them.
    "keys deleted": {"tinsmith:home:"},
    # Steps of which a plain command, which Redis refuses when full, is a script by now. It leaves the same behind.
    "scripted steps": {"calls are taken", "overdue", "acknowledge"},
    # Answers that ask for the bytes of a large call, which go there once it is not refused, or to read a call's content
    # first, which is large or in the object store.
    "script answers": [["absent", ""], "read"],
    # Steps whose answers end with the content of the call, which ecb7b39 reads before.
    "answers with content": {"next", "next, doomed", "claim", "last attempt"},
    # Each process has its own.
    "broker options": {
        *("max_retries", "interval_start", "interval_step", "interval_max"),
        *("socket_timeout", "socket_keepalive", "socket_keepalive_options", "retry_on_timeout"),
    },
    # Times for messages that a worker of ecb7b39 notes at the broker. Today's workers note none, and leave these alone.
    "broker options gone": {"visibility_timeout", "unacked_restore_interval", "unacked_restore_throttle"},
}
