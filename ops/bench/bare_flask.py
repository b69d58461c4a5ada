"""A Flask application without a service: each route answers the same small JSON. The floor of the API's reads."""

from __future__ import annotations

from flask import Flask, request

_ANSWER = {"model_id": "m", "model_data": {"arch": "LlamaForCausalLM"}, "is_lora": True, "lora_rank": 8}

application = Flask("bare")


@application.get("/api/v1/healthz")
def get() -> dict[str, object]:
    return _ANSWER


@application.post("/api/v1/get_info")
def post() -> dict[str, object]:
    request.get_json()
    return _ANSWER
