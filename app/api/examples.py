"""Examples of the calls that a reader of /docs tries first. They are one story: the ids in a body are those of the
answers before it. A test plays the story."""

from __future__ import annotations

from typing import Any, NamedTuple


class Example(NamedTuple):
    """The bodies of one call; the request is None for a GET."""

    request: Any
    response: Any


SESSION_ID = "7f0c6f3e-2d1b-4c58-9a57-0c1f5d9a41be"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_MODEL_ID = f"{SESSION_ID}:train:0"
_SAMPLER_ID = f"{SESSION_ID}:sample:0"
_TOKENS = [[40, 41, 42], [41, 42, 43]]


def _promise(seq: int) -> dict[str, str]:
    return {"model_id": _MODEL_ID, "request_id": f"{_MODEL_ID}:{seq}"}


def _tensor(data: list[Any], dtype: str) -> dict[str, Any]:
    return {"data": data, "dtype": dtype, "shape": [len(data)]}


CAPABILITIES = Example(
    None,
    {
        "supported_models": [
            {
                "model_name": BASE_MODEL,
                "max_context_length": 8192,
                "trainable": True,
                "sampleable": True,
                "dtype": "float32",
                "trainable_groups": ["attn", "mlp"],
                "never_adapted": {},
                "refusals": {},
            }
        ]
    },
)
CREATE_SESSION = Example(
    {"display_name": "first try", "tags": ["docs"], "user_metadata": {"purpose": "demo"}}, {"session_id": SESSION_ID}
)
CREATE_MODEL = Example(
    {"session_id": SESSION_ID, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8, "seed": 0}},
    _promise(0),
)
FORWARD_BACKWARD = Example(
    {
        "model_id": _MODEL_ID,
        "seq_id": 1,
        "forward_backward_input": {
            "data": [
                {
                    "model_input": {"chunks": [{"type": "encoded_text", "tokens": _TOKENS[0]}]},
                    "loss_fn_inputs": {
                        "target_tokens": _tensor(_TOKENS[1], "int64"),
                        "weights": _tensor([0.0, 1.0, 1.0], "float32"),
                    },
                }
            ],
            "loss_fn": "cross_entropy",
        },
    },
    _promise(1),
)
RETRIEVE_FUTURE = Example(
    {"request_id": f"{_MODEL_ID}:1"},
    {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": _tensor([-2.5, -1.5, -0.5], "float32")}],
        "metrics": {"loss:sum": 2.0},
    },
)
TRY_AGAIN = {
    "type": "try_again",
    "request_id": f"{_MODEL_ID}:1",
    "queue_state": "active",
    "queue_state_reason": "it runs now, or starts next",
}
OPTIM_STEP = Example(
    {"model_id": _MODEL_ID, "seq_id": 2, "adam_params": {"learning_rate": 0.0001, "beta1": 0.9, "beta2": 0.95}},
    _promise(2),
)
SAVE_WEIGHTS = Example({"model_id": _MODEL_ID, "seq_id": 3, "path": "step-1"}, _promise(3))
CREATE_SAMPLING_SESSION = Example(
    {"session_id": SESSION_ID, "sampling_session_seq_id": 0, "base_model": BASE_MODEL},
    {"sampling_session_id": _SAMPLER_ID},
)
SAMPLE = Example(
    {
        "sampling_session_id": _SAMPLER_ID,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": _TOKENS[0]}]},
        "sampling_params": {"max_tokens": 16, "temperature": 0.7, "seed": 1},
    },
    {"request_id": f"{_SAMPLER_ID}:0", "sample_sequence_ids": [f"{_SAMPLER_ID}:0-0"]},
)


def _completed(kind: str, prefix: str, prompt_tokens: int, choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{SESSION_ID}:sample:1003342605890455473:0",
        "object": kind,
        "created": 1767225600,
        "model": BASE_MODEL,
        "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 3, "total_tokens": prompt_tokens + 3},
    }


CHAT = Example(
    {
        "model": BASE_MODEL,
        "messages": [
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": "What is the capital of Italy?"},
        ],
        "max_tokens": 32,
        "temperature": 0.7,
    },
    _completed("chat.completion", "chatcmpl", 27, {"message": {"role": "assistant", "content": "Rome."}}),
)
_CONVERSATION = {
    "model": BASE_MODEL,
    "system": "Answer in one word.",
    "messages": [{"role": "user", "content": "What is the capital of Italy?"}],
}
MESSAGE = Example(
    {**_CONVERSATION, "max_tokens": 32, "temperature": 0.7},
    {
        "id": f"msg_{SESSION_ID}:sample:1003342605890455473:0",
        "type": "message",
        "role": "assistant",
        "model": BASE_MODEL,
        "content": [{"type": "text", "text": "Rome."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 27,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    },
)
COUNT = Example(_CONVERSATION, {"input_tokens": 27})
COMPLETION = Example(
    {"model": BASE_MODEL, "prompt": "The capital of Italy is", "max_tokens": 8, "temperature": 0.7},
    _completed("text_completion", "cmpl", 5, {"text": " Rome."}),
)
