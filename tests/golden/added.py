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
_CHOSEN = {"default": 0, "minimum": 0, "type": "integer"}
_CHECKPOINT = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
# Only summaries and descriptions of these differ: they are in plainer words.
_REWORDED = {
    "delete /api/v1/auth/apikey/me": "bd652d025016a353df1405e16ec7fbe8adb0738323ecf9ca6559daa16d415cc3",
    "delete /api/v1/queue/{request_id}": "faf010f3f42dc9812c5e078b7c4716d37e241f7f59d6d9a6a7840f626eec777a",
    f"delete {_CHECKPOINT}/publish": "af62b7112c50248f3483e9143a7137161a83c110d21f879ceca737ea04b087f5",
    "get /api/models/{repo_id}": "dcd0c43318c060a9460b99bee7849243da90bafc1ceb2753d7c6b331f56d2390",
    "get /api/models/{repo_id}/revision/{revision}": "dcd0c43318c060a9460b99bee7849243da90bafc1ceb2753d7c6b331f56d2390",
    "get /api/v1/audit": "fe042bf46d2f5a158bc1ea5c46106abba5e08bd313dfe06dcc2b417358dfaef2",
    "get /api/v1/auth/apikey/me": "eaebe7266790f06d91274a2ae5c741d7742e693fc8f592b1d808aa0133bce3d8",
    "get /api/v1/billing/usage/checkpoints/current": "8da84bc8e202eeb37de6493a51701fb9fe0bdfdde019619692242643eedfa67f",
    "get /api/v1/billing/usage/events": "fabc9973bd44c4c868816e9b56b83eefbb3760342fb71aed6edb1d800da72b35",
    "get /api/v1/limits": "7891f05b78d548c701097ec41bf12d8922b082a8acd6acaf1d8cf0e4932bf8cb",
    "get /api/v1/queue": "e9e4fdfb1ac3870b87976ce9060e245f6efb6adeafd2f25b400731d164fcd992",
    "get /api/v1/samplers/{sampler_id}": "456250c2278a2892f4c5d9f09406a5987a4051fde41104a8801b44b47b8befc6",
    "get /api/v1/training_runs/{run}": "ebac6de3f33f8c7bab2fe7d699a9a0c1295945d75fdf982763f999a32aa44a3f",
    "get /api/v1/training_runs/{run}/checkpoints": "3a3990c1d4cc7d6b19462670ddef726138aebeba147034f16bcc1eb6f5d7131a",
    f"get {_CHECKPOINT}/archive": "7fc3760a4ca066f52b896a168ad7c6bf07b3955a1d95b4fba2be2194ca9f31d6",
    "post /api/v1/auth/token": "9f33ff1d22b081007a92d7a1d050c400ba6c57334a23356f25dfd437ddc62d27",
    "post /api/v1/client/config": "7661c65ffe54a19dc5049828733e080d016ee6875b3b31b22945642cd42169b1",
    "post /api/v1/client/dynamic_config": "2b81d46fca4ec22d71ae777687e2e693bd58a62df58a08c63525369797205760",
    "post /api/v1/copy_weights": "fc1a09bdd81720b96a11a0570c607a5b277bea4b2dd7ee70d8408278ddbd44ad",
    "post /api/v1/create_custom_loss": "f2540e61cea3febafc6d46012166a0aac323112f5f3ac0c55a70a70ff253fc7a",
    "post /api/v1/get_info": "b132a032bd534f552c0a6611b67fe8d7776ee98f360db65a5d8a987af7282607",
    "post /api/v1/join_sampling_session": "93d5f00c552d6c283b95af3e578b8c3541102e990e0d3bdfbfa0045c0d5581db",
    "post /api/v1/retrieve_future": "51605d54b4741ca546fd80a2d08fdf87302e0761b0958c6481c8df3d77f335ff",
    "post /api/v1/retrieve_futures": "d832b0ea7ac802b04c3fc8bac9be99e0d0141cc4eb29abb723dd2a12c3d75c5b",
    f"post {_CHECKPOINT}/publish": "bf202658631afefa3e0a1d21a5506565938dd7f77fb575f012b95fb31734bb64",
    "post /api/v1/unload_model": "9033cbef0819317682924729aca9822594a6ef86421462cc77011529f1a4b95f",
    "post /api/v1/weights_info": "6b0495dccac6f7b1f285ee2ec0285c04851a4046a7b305d845a51478299f3669",
    "post /oai/api/v1/completions": "a128f38e78a158ac0dc5c25f2c74b9b191bc646853a88d432d8d337a41f79b5a",
    f"put {_CHECKPOINT}/ttl": "3f433c574074f493ce22a502ce92d109e45db8fea8ef6cfa672f4f893e8cd200",
    "schemas CopyWeights": "2db128cf0536716262f3722e69ab0e21371c54e2b8648da2dd9946cfecdda676",
    "schemas LoadWeights": "8bf48c5a0e1b800cb58a4f833d273a1b7e95dd56739f7cb91cdecf545a8f36bd",
    "schemas SaveWeightsExternal": "0bf0c768dde3a1eb691ba68efee86fe08020af9780d324c1f93d8bedf40c9f73",
    "schemas SaveWeightsForSampler": "8ff4e936825749ef035554fc4b0a357cb34599efc68b901c4adcb531adffd07e",
    "schemas WaitingCall": "1f673d3145a446b5ec5d5300103bedd71e159755d3344a6b7e06cadece03c0f4",
}

CHANGED: dict[str, dict[str, Any]] = {
    # A negative index was accepted, and failed when the worker started; each copy can have a list of its own, and
    # there can be none. The cookbook's greatest default rank is 128. A frozen base can have 4 or 8 bits.
    "settings": {
        **{f"base_models.{section}.devices": _DEVICES for section in _WORKERS},
        **{f"base_models.{section}.count": _COUNT for section in _WORKERS},
        "base_models.max_rank": {"default": 128, "minimum": 1, "type": "integer"},
        "base_models.dtype": {"default": "auto", "enum": _DTYPES, "type": "string"},
        # It was false, and a long datum ran out of memory.
        **{f"base_models.{section}.activation_checkpointing": _OR_AUTO for section in ("trainer", "full")},
        # It was 64; 0 chooses by the GPU.
        **{f"base_models.{section}.max_batch": _CHOSEN for section in ("sampler", "full_sampler")},
        # It was 1024, which keeps no GPU busy.
        **{f"base_models.{section}.micro_batch_tokens": _NUMBER_OR_AUTO for section in ("trainer", "full")},
    },
    "setting values": {
        "base_models[0].max_rank": 128,
        **{f"base_models[0].{section}.activation_checkpointing": "auto" for section in ("trainer", "full")},
        **{f"base_models[0].{section}.micro_batch_tokens": "auto" for section in ("trainer", "full")},
        **{f"base_models[0].{section}.max_batch": 0 for section in ("sampler", "full_sampler")},
    },
    # A checkpoint's answer also has its base model; a served model's has what adapters cover, and who refuses it.
    # Uploads are a group of routes of their own.
    "openapi": {
        **_REWORDED,
        "get /api/v1/get_server_capabilities": "deacc034ff85e815f0de4062db3a366fd1bd55db48827ee0dc7c385c6db8b5d5",
        "schemas SupportedModel": "c0d017e4a6a6df2b1f8fd34dbf34a39cfd534735d04e59a271b8c641d7e7042d",
        "schemas Sample": "b37fc481701bad27554f6e75c5a1ab2021592e0e4ee7b5f09630e0205c5a278a",
        # The limit live_sessions, and its use.
        "schemas _Limits": "eb4a5bfcb54a74a5d341f5ae59eab1ec5a8d080215d385cc254cfbf7e5e05d00",
        "schemas _Used": "60a0937df30bb66381195429b6db12967b4785cbd42c56df68c3b0f96fef7f99",
        "tags": "2224ae7df26554031d41338a7e164ca5d3230bbfa010dd60c21f18e9290ee91a",
        # parallel_tool_calls can be false.
        "schemas ChatCompletion": "51e6ca9432faa0094792bcc383be9b1bb601581f61dc746c60d2597e9df8a9fb",
        "schemas Checkpoint": "e84a265c8f99dde1a6ef60d3716015d2da09d885e191024ca437442c50198981",
    },
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
_SEEN = {
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
ADDED: dict[str, set[str]] = {
    "openapi": {
        "get /api/v1/public_archives/{run}/{kind}/{name}",
        "get /oai/api/v1/models/{model}",
        "parameters /api/v1/public_archives/{run}/{kind}/{name}",
        "parameters /api/v1/uploads/{most_bytes}/{key}",
        "parameters /oai/api/v1/models/{model}",
        "post /api/v1/checkpoints/search",
        "post /api/v1/external_weights_upload_finish",
        "post /api/v1/external_weights_upload_start",
        "put /api/v1/uploads/{most_bytes}/{key}",
        "schemas CheckpointCursor",
        "schemas CheckpointsFound",
        "schemas FinishUpload",
        "schemas NextCheckpoint",
        "schemas SearchCheckpoints",
        "schemas StartUpload",
        "schemas UploadStarted",
    },
    "command line": {
        *(
            "tinsmith --version",
            "tinsmith up --quiet",
            "tinsmith import folder",
            "tinsmith admin limits set --live-sessions",
        ),
        *(f"python -m workers.{worker} --copy" for worker in ("trainer", "sampler")),
        *_OF_IMPORT,
        *_SEEN,
    },
    "codec": {"Image"},
    "environment": {"TINSMITH_METRICS_PORT"},
    "settings": {
        "api.processes",
        "limits.project.live_sessions",
        "limits.samples",
        "limits.sampled_tokens",
        "base_models.router_replay",
        *(f"engine.{name}" for name in _ENGINE),
        *(f"base_models.{section}.sequence_parallel" for section in ("trainer", "full")),
        *(f"base_models.{section}.tensor_parallel" for section in ("trainer", "full")),
        *(f"base_models.{section}.fused_kernels" for section in ("trainer", "full")),
    },
    "setting values": {
        "api.processes",
        "limits.project.live_sessions",
        "limits.samples",
        "limits.sampled_tokens",
        "base_models[0].router_replay",
        *(f"engine.{name}" for name in _ENGINE),
        *(f"base_models[0].{section}.sequence_parallel" for section in ("trainer", "full")),
        *(f"base_models[0].{section}.tensor_parallel" for section in ("trainer", "full")),
        *(f"base_models[0].{section}.fused_kernels" for section in ("trainer", "full")),
    },
    # Keys that start so. Processes of ecb7b39 neither read nor write them, which RedisRecords expects of its lists.
    "keys left behind": {
        *("tinsmith:checkpoints_of:", "tinsmith:calls_taken"),
        *("tinsmith:models_of:", "tinsmith:model_owners"),
        *("tinsmith:sessions_of:", "tinsmith:session_owners", "tinsmith:sessions_live:"),
        *("tinsmith:samplers_used", "tinsmith:earlier_api"),
        "tinsmith:progress:",
    },
    # Keys that ecb7b39 writes only to note that it made lists which it finds made.
    "keys gone": {"tinsmith:runs_listed"},
    # Values by key, today and then, where ecb7b39 only asks whether the key exists.
    "values": {"tinsmith:taking_calls": ("pieces", "")},
    # Keys that start so and are now deleted before they expire; every version does without them.
    "keys deleted": {"tinsmith:home:"},
    # Steps of which a plain command, which Redis refuses when full, is a script by now. It leaves the same behind.
    "scripted steps": {"calls are taken", "overdue"},
    # Answers that ask for the bytes of a large call, which go there once it is not refused.
    "script answers": [["absent", ""]],
    # Each process has its own.
    "broker options": {
        *("max_retries", "interval_start", "interval_step", "interval_max"),
        *("socket_timeout", "socket_keepalive", "socket_keepalive_options", "retry_on_timeout"),
    },
}
