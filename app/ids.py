"""Builds and parses the text of every id.

    session                 <uuid>
    model, or run           <session>:train:<number>
    sampling session        <session>:sample:<number>
    custom loss             <session>:loss:<number>
    call                    <model>:<seq>, <model>:unload:0 or <sampling session>:<seq>
    one sample of a call    <sampling session>:<seq>-<index>
    checkpoint              tinker://<model>/<kind>/<name>

Request ids are derived, not random: a repeated call has the same id in every API process and after every restart.
The id in Flower or in a log line names the model and the seq.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from app.errors import BadRequest

MAX_SEQ = 2**31 - 1
"""The largest number that a client gives a call on a model."""
MAX_NUMBER = 10**9 - 1
"""The largest number that a client gives a model, a sampling session or a custom loss."""
CHECKPOINT_KINDS = ("weights", "sampler_weights", "external_weights")
CHECKPOINT_KINDS_TEXT = ", ".join(CHECKPOINT_KINDS[:-1]) + f" or {CHECKPOINT_KINDS[-1]}"
_OPENAI = uuid.uuid5(uuid.NAMESPACE_URL, "/oai/api/v1")
_COPIES = uuid.uuid5(uuid.NAMESPACE_URL, "/api/v1/copy_weights")
_SESSIONS = uuid.uuid5(uuid.NAMESPACE_URL, "/api/v1/create_session")
_UPLOADS = uuid.uuid5(uuid.NAMESPACE_URL, "/api/v1/external_weights_upload_start")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SESSION = "[A-Za-z0-9-]{1,64}"
_NUMBER = f"[0-9]{{1,{len(str(MAX_NUMBER))}}}"
_LONG = "[0-9]{1,20}"
_MODEL = f"{_SESSION}:train:{_NUMBER}"
_MODEL_ID = re.compile(_MODEL)
_UNLOAD_ID = re.compile(f"({_MODEL}):unload:0")
_LOSS_ID = re.compile(f"{_SESSION}:loss:{_NUMBER}")
_SEQUENCE_ID = re.compile(f"({_SESSION}:sample:{_LONG}):{_LONG}-[0-9]{{1,10}}")
_REQUEST_ID = re.compile(f"{_SESSION}:((train|sample):{_LONG}(:unload)?:{_LONG}(-[0-9]{{1,10}})?|loss:{_NUMBER})")


def new_session_id() -> str:
    return str(uuid.uuid4())


def session_id(project: str, api_key_id: str, key: str | None) -> str:
    """The id of a session to open. A repeat of the call under the same idempotency key, with the same API key, gets the
    same session."""
    return str(uuid.uuid5(_SESSIONS, f"{project}\n{api_key_id}\n{key}")) if key else new_session_id()


def upload_id(project: str, api_key_id: str, key: str | None) -> str:
    """The id of an upload to start; a repeat gets the same upload, as in `session_id`. It is also the id of the
    checkpoint's session."""
    return str(uuid.uuid5(_UPLOADS, f"{project}\n{api_key_id}\n{key}")) if key else new_session_id()


def copy_session_id(project: str, key: str | None) -> str:
    """The session of a copy into a project. A repeat of the call under the same idempotency key gets the same
    session."""
    return str(uuid.uuid5(_COPIES, f"{project}\n{key}")) if key else new_session_id()


def openai_session_id(project: str) -> str:
    """The session of all OpenAI-compatible calls of a project."""
    return str(uuid.uuid5(_OPENAI, project))


def session_of(model_id: str) -> str:
    return model_id.rpartition(":train:")[0]


def model_id(session_id: str, model_seq_id: int) -> str:
    """A model's id. The SDK computes this text itself when it creates a model from a checkpoint, so the form is
    fixed."""
    return f"{session_id}:train:{model_seq_id}"


def is_model_id(text: str) -> bool:
    return _MODEL_ID.fullmatch(text) is not None


def model_prefix(session_id: str) -> str:
    """The prefix of the ids of all models of a session."""
    return f"{session_id}:train:"


def sampling_session_id(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"


def openai_sampler_id(session_id: str, base_model: str, prefix: str) -> str:
    """The id of the sampler in that session for an adapter's files (with an empty prefix, for the base model)."""
    digest = hashlib.sha256(f"{base_model}\n{prefix}".encode()).digest()
    return sampling_session_id(session_id, int.from_bytes(digest[:8], "big") >> 1)


def sampler_prefix(session_id: str) -> str:
    """The prefix of the ids of all samplers of a session."""
    return f"{session_id}:sample:"


def newest_first(ids: Iterable[str]) -> list[str]:
    """The models or samplers of one session by their numbers, which count up."""
    return sorted(ids, key=seq_of, reverse=True)


def loss_id(session_id: str, custom_loss_seq_id: int) -> str:
    """The id of a custom loss. It is also the request id of the call that creates it."""
    return f"{session_id}:loss:{custom_loss_seq_id}"


def is_loss_id(text: str) -> bool:
    return _LOSS_ID.fullmatch(text) is not None


def loss_prefix(session_id: str) -> str:
    """The prefix of the ids of all custom losses of a session."""
    return f"{session_id}:loss:"


def unload_id(model_id: str) -> str:
    """The request id of a model's unloading."""
    return f"{model_id}:unload:0"


def unloaded_by(request_id: str) -> str | None:
    """The model that the unloading with this request id unloads; None for any other request id."""
    match = _UNLOAD_ID.fullmatch(request_id)
    return match and match[1]


def request_id(parent_id: str, seq_id: int) -> str:
    """The id of a call. `parent_id` is a model id or a sampling session id."""
    return f"{parent_id}:{seq_id}"


def is_request_id(text: str) -> bool:
    """True for the form of a call's id; such a call need not exist."""
    return _REQUEST_ID.fullmatch(text) is not None


def parent_of(request_id: str) -> str:
    """The model or sampling session of a call."""
    return request_id.rpartition(":")[0]


def seq_of(request_id: str) -> int:
    """The seq of a call."""
    return int(request_id.rpartition(":")[2])


def poll_target(sampler_id: str, clone: int | str) -> str:
    """The key of all requests of one client of a sampling session. The client may wait for them together. The key is
    internal."""
    return f"{sampler_id}/{clone}"


def target_of(request_id: str) -> str:
    """The poll target of a sampling request. The seqs of clone n start at n * 10^9."""
    sampler_id, _, seq = request_id.rpartition(":")
    return poll_target(sampler_id, seq[:-9] or "0")


def sequence_id(request_id: str, index: int) -> str:
    """The id of one sample of a sampling request."""
    return f"{request_id}-{index}"


def request_of(sequence_id: str) -> str:
    """The sampling request of a sample."""
    return sequence_id.rpartition("-")[0]


def sampler_of(sequence_id: str) -> str:
    """The sampling session of a sample; empty for text that is no such id."""
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return match[1] if match else ""


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """`tinker://{model_id}/{kind}/{name}`: a checkpoint's public address."""

    model_id: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        """Raises BadRequest when `text` is not such a path. The message names the part that is wrong."""
        wrong = f"{text[:200]!r} is not a checkpoint path: "
        parts = text.removeprefix("tinker://").split("/")
        if not text.startswith("tinker://") or len(parts) != 3:
            raise BadRequest(
                f"{wrong}expected tinker://<training run>/<kind>/<name>, with kind {CHECKPOINT_KINDS_TEXT}"
            )
        run, kind, name = parts
        if not is_model_id(run):
            raise BadRequest(f"{wrong}{run[:80]!r} is not a training run id, which is <session>:train:<n>")
        if kind not in CHECKPOINT_KINDS:
            raise BadRequest(f"{wrong}{kind[:80]!r} is not a kind of checkpoint: use {CHECKPOINT_KINDS_TEXT}")
        return cls(run, kind, check_name(name))


def check_name(name: str) -> str:
    """Returns a checkpoint's name unchanged. Raises BadRequest when the name cannot be part of a path."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name[:200]!r} is not a checkpoint name: use 1 to 128 letters, digits, '.', '_' or '-', "
            "not starting with '.' or '-'"
        )
    return name


def checkpoint_path_prefix(model_id: str) -> str:
    """The prefix of the paths of all checkpoints of a model."""
    return f"tinker://{model_id}/"


def checkpoint_uuid(path: str) -> str:
    """A checkpoint's uuid, which the cursor of a search names."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, path))


def hub_id(base_model: str) -> str:
    """A base model's name as the SDK shortens it for Hugging Face's Hub: without a `:suffix` or a third part."""
    return "/".join(base_model.split(":")[0].split("/")[:2])


def stable_seed(text: str) -> int:
    """A seed in [0, 2^31) derived from an id, so that a retry or a replay draws the same random numbers."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def node_of(worker: str) -> str:
    """The node of a worker "node/boot": the name under which its processes follow one another, the target of a
    dispatch."""
    return worker.rpartition("/")[0]
