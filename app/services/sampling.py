"""Samplers (sampling sessions), and the sampling requests on them: their form, their checks and their admission."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from app import ids
from app.domain.accounts import Caller
from app.domain.losses import NOT_OFFERED
from app.domain.ops import LoraSpec
from app.domain.records import BaseModelInfo, Sampler, Session
from app.domain.sampling import CONTEXT_OVERFLOW, MAX_TOP, Cells, SampleRequest
from app.errors import BadRequest
from app.services.admission import AdmissionService
from app.services.base_models import BaseModels, sampler_role
from app.services.tenants.access import load_checkpoint, load_owned, load_readable, sampler_exists
from app.services.tenants.limits import QuotaService
from app.services.validation import (
    check_adapter,
    check_reads_images,
    check_sampleable,
    check_sampled_role,
    in_range,
)
from app.settings import LimitSettings
from app.stores.redis.records import RedisRecords, dump
from app.wire.json_bodies import model_input, tensor
from app.wire.tensors import to_cells

TARGETS = "target_prompt_logprobs"
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
"""Most UTF-8 bytes of one stop string. The sampled text is searched for all stop strings at every token."""
MAX_TEMPERATURE = 2
"""vLLM supports no more, and OpenAI's clients do not ask for more."""
MAX_TOP_K = 2**31 - 1
MAX_CELLS = 2**22
"""Most additional logprobs in one answer, besides those of the prompt and the samples: 32 MiB, half of it ids.
limits.json_values allows only a fourth as many target ids by default, since the JSON of a request brings each."""


class SamplingService:
    """Creates samplers and admits sampling requests. A sampler names immutable weights, so its requests need no order
    and can safely run again. A method that changes something also raises Forbidden for a viewer, and the errors of
    QuotaService."""

    def __init__(
        self,
        records: RedisRecords,
        bases: BaseModels,
        admission: AdmissionService,
        quotas: QuotaService,
        limits: LimitSettings,
    ) -> None:
        self._records = records
        self._limits = limits
        self._quotas = quotas
        self._bases = bases
        self._admission = admission

    def create_session(self, caller: Caller, asked: Mapping[str, Any]) -> str:
        """Creates a sampler for a base model or a checkpoint, and returns its id; a repeat returns the same id.

        Raises NotFound (session, checkpoint), BadRequest, or Unavailable while there is no room for another sampler.
        """
        session = load_owned(self._records, Session, asked["session_id"], caller)
        base, path = asked.get("base_model"), asked.get("model_path")
        if base is None and path is None:
            raise BadRequest("create_sampling_session needs model_path or base_model")
        sampler_id = ids.sampling_session_id(asked["session_id"], asked["sampling_session_seq_id"])
        if not self._exists(sampler_id, asked):
            sampler = self.resolve(caller, session.owner, asked["session_id"], base, path)
            self._quotas.take(caller, session.owner)
            if not self._records.put_new(Sampler.namespace, sampler_id, dump(sampler)):
                self._exists(sampler_id, asked)  # raises if another call has just created another sampler
        return sampler_id

    def join(self, sampler_id: str, caller: Caller) -> int:
        """The number of one more client of the sampler, from 1 on; 0 is the client that created the sampler. Raises
        NotFound."""
        self._quotas.take(caller, load_owned(self._records, Sampler, sampler_id, caller).owner)
        return self._records.join(sampler_id)

    def describe(self, sampler_id: str, caller: Caller) -> dict[str, str]:
        """The sampler's id, base model and checkpoint path. Raises NotFound."""
        sampler = load_readable(self._records, Sampler, sampler_id, caller)
        path = {"model_path": sampler.model_path} if sampler.model_path else {}
        return {"sampler_id": sampler_id, "base_model": sampler.base_model, **path}

    def sample(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Admits a sampling request, and returns a future with the id of each sample. Raises NotFound (sampler),
        BadRequest or Unavailable."""
        check_records(asked)
        sampler_id, seq = asked["sampling_session_id"], asked["seq_id"]
        sampler = load_owned(self._records, Sampler, sampler_id, caller)
        info = self._bases.info(sampler_role(full=sampler.full), sampler.base_model)
        request_id = ids.request_id(sampler_id, seq)
        request = _request(asked, ids.stable_seed(request_id), info.max_context)
        check_sample(request, info, self._limits)
        self._admission.admit_sample(caller, sampler_id, sampler, seq, request)
        names = [ids.sequence_id(request_id, i) for i in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": names}

    def resolve(self, caller: Caller, owner: str, session_id: str, base: str | None, path: str | None) -> Sampler:
        """A sampler of project `owner` for a checkpoint, or for a base model if there is no path. The sampler is not
        stored. Raises NotFound or BadRequest."""
        if path is None:
            return Sampler(owner, session_id, self._bases.settings(base or "").name, time.time())
        parsed = ids.TinkerPath.parse(path)
        checkpoint = load_checkpoint(self._records, parsed, caller)
        check_adapter(parsed, checkpoint)
        if base not in (None, checkpoint.base_model):
            raise BadRequest(f"{path} was trained on {checkpoint.base_model}, not on {base[:200]!r}")
        check_sampled_role(path, critic=checkpoint.critic)
        name, prefix, full = checkpoint.base_model, checkpoint.prefix, checkpoint.full
        check_sampleable(self._bases.settings(name), full=full)
        if checkpoint.lora:
            self._bases.check_sampled(LoraSpec(**checkpoint.lora), name)
        return Sampler(owner, session_id, name, time.time(), path, prefix, full=full)

    def _exists(self, sampler_id: str, asked: Mapping[str, Any]) -> bool:
        """True if the sampler exists already; a repeat finds it even if the checkpoint has been deleted since. Raises
        BadRequest if the id belongs to a different sampler."""
        found = self._records.find(Sampler, sampler_id)
        if found is None:
            return False
        ephemeral = found.prefix and not found.model_path
        same = found.model_path == (asked.get("model_path") or "")
        if ephemeral or not same or asked.get("base_model") not in (None, found.base_model):
            raise sampler_exists(asked["sampling_session_seq_id"])
        return True


def _request(asked: Mapping[str, Any], seed: int, max_context: int) -> SampleRequest:
    """The decoded sampling request. The context length caps `max_tokens`, and the rest of the context is its
    default."""
    params = asked["sampling_params"]
    sent = model_input(asked["prompt"]["chunks"], "prompt")
    prompt = sent.tokens
    room = max(1, max_context - len(prompt))
    stop = params.get("stop")
    strings, tokens = _stops(stop)
    return SampleRequest(
        prompt=prompt,
        num_samples=asked["num_samples"],
        max_tokens=min(room, room if params.get("max_tokens") is None else params["max_tokens"]),
        seed=seed if params.get("seed") is None else params["seed"],
        temperature=params["temperature"],
        top_p=params["top_p"],
        top_k=params["top_k"],
        stop_strings=strings,
        stop_tokens=tokens,
        ignore_eos=stop == [],
        prompt_logprobs=bool(asked["prompt_logprobs"]),
        prompt_last_n=_last_n(asked["prompt_logprobs_last_n"]),
        prompt_top=asked["topk_prompt_logprobs"] or 0,
        prompt_targets=_targets(asked["target_prompt_logprobs"]),
        prompt_alternatives=asked["prompt_alt_tokens_k"] or 0,
        sample_top=asked["topk_sample_logprobs"] or 0,
        images=tuple(sent.images),
    )


def _last_n(asked: int | None) -> int:
    """The number of prompt tokens to score, or 0 for all. A client asks for all by sending nothing, so a 0 from a
    client is a mistake. Raises BadRequest."""
    if asked is not None and asked < 1:
        raise BadRequest(f"prompt_logprobs_last_n {asked} is out of range: leave it out to score the whole prompt")
    return asked or 0


def _targets(asked: Any) -> Cells | None:
    return None if asked is None else to_cells(tensor(asked, TARGETS), TARGETS)


def _stops(stop: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    entries = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if isinstance(entries, list):
        if all(isinstance(entry, str) for entry in entries):
            return tuple(entries), ()
        if all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries):
            return (), tuple(entries)
    raise BadRequest(
        f"sampling_params.stop must be a string, a list of strings or a list of token ids (got {stop!r:.80})"
    )


def check_sample(request: SampleRequest, info: BaseModelInfo, limits: LimitSettings) -> None:
    """Raises BadRequest when `request` cannot run on this base model, or is larger than the limits."""
    check_prompt(request, info)
    in_range("num_samples", request.num_samples, 1, limits.samples)
    in_range("sampling_params.max_tokens", request.max_tokens, 1)
    tokens = request.num_samples * request.max_tokens
    if tokens > limits.sampled_tokens:
        raise BadRequest(
            f"num_samples {request.num_samples} * max_tokens {request.max_tokens} are {tokens} tokens; one call may "
            f"sample at most {limits.sampled_tokens} here: send fewer samples in a call, or a lower max_tokens"
        )
    check_schema(request, info)
    in_range("sampling_params.temperature", request.temperature, 0, MAX_TEMPERATURE)
    in_range("sampling_params.top_p", request.top_p, 0, 1, open_ends="(")
    if request.top_k != -1 and not 1 <= request.top_k <= MAX_TOP_K:
        raise BadRequest(
            f"sampling_params.top_k {request.top_k!r:.40} is out of range: it must be at least 1 and at most "
            f"{MAX_TOP_K}; -1 means off"
        )
    check_stops(request, info)
    check_scores(request, info)


def check_records(asked: Mapping[str, Any]) -> None:
    """Refuses a sample for a loss that is not offered, before the program pays for rollouts. Raises BadRequest."""
    if asked["record_stability_info"]:
        raise BadRequest(
            "record_stability_info asks for records of loss_fn stable_reinforce, which is not offered: "
            f"{NOT_OFFERED['stable_reinforce']}"
        )


def check_prompt(request: SampleRequest, info: BaseModelInfo) -> None:
    """Requires ids in the vocabulary, and room for one more token in the context unless the prompt is to be scored."""
    prompt = request.prompt
    check_reads_images(request.images, info)
    if not len(prompt):
        raise BadRequest("the prompt is empty: send at least one token")
    longest = request.longest_prompt(info.max_context)
    if len(prompt) > longest:
        # Agents compact their conversation when they read the first words: Anthropic's, and tinker-cookbook's proxy.
        raise BadRequest(
            f"prompt is too long: {len(prompt)} tokens > {longest} maximum. {CONTEXT_OVERFLOW}: {len(prompt)} prompt "
            f"tokens + {request.max_tokens} max_tokens > {info.max_context}"
        )
    outside = (prompt < 0) | (prompt >= info.vocab_size)
    if outside.any():
        index = int(outside.argmax())
        raise BadRequest(f"prompt at position {index}: token {prompt[index]} is not in 0..{info.vocab_size - 1}")


def check_schema(request: SampleRequest, info: BaseModelInfo) -> None:
    """Requires a sampler that follows a JSON schema, if there is one."""
    if request.json_schema and not info.follows_schemas:
        raise BadRequest(
            f"the sampler of {info.name} cannot make its answers follow a JSON schema: leave the format out, or serve "
            'the model with sampler.backend "vllm", which can'
        )


def check_stops(request: SampleRequest, info: BaseModelInfo) -> None:
    """Limits the number and the length of the stop entries. None is empty, and ids are in the vocabulary."""
    count = len(request.stop_strings) + len(request.stop_tokens)
    if count > MAX_STOPS:
        raise BadRequest(f"sampling_params.stop has {count} entries; at most {MAX_STOPS} are allowed")
    if "" in request.stop_strings:
        raise BadRequest("sampling_params.stop holds an empty string")
    for stop in request.stop_strings:
        size = len(stop.encode("utf-8", "surrogatepass"))
        if size > MAX_STOP_BYTES:
            raise BadRequest(
                f"sampling_params.stop holds a string of {size} bytes; at most {MAX_STOP_BYTES} are allowed"
            )
    for token in request.stop_tokens:
        in_range("sampling_params.stop token", token, 0, info.vocab_size - 1)


def check_scores(request: SampleRequest, info: BaseModelInfo) -> None:
    """Requires that the model can give every requested logprob, and limits the number of logprobs in one answer."""
    rows = len(request.prompt) - 1
    if request.prompt_last_n:
        if not request.prompt_logprobs:
            raise BadRequest("prompt_logprobs_last_n needs prompt_logprobs: set both, or leave it out")
        in_range("prompt_logprobs_last_n", request.prompt_last_n, 1, rows)
    likeliest = min(MAX_TOP, info.vocab_size)
    in_range("topk_prompt_logprobs", request.prompt_top, 0, likeliest)
    in_range("topk_sample_logprobs", request.sample_top, 0, likeliest)
    in_range("prompt_alt_tokens_k", request.prompt_alternatives, 0, MAX_CELLS)
    targets = 0 if request.prompt_targets is None else check_targets(request.prompt_targets, rows, info.vocab_size)
    check_size("topk_prompt_logprobs", request.prompt_top, rows + 1)
    check_size("prompt_alt_tokens_k", request.prompt_alternatives, rows)
    check_size("target_prompt_logprobs", targets, rows)
    check_size("topk_sample_logprobs", request.sample_top, request.num_samples * request.max_tokens)


def check_targets(targets: Cells, rows: int, vocab_size: int) -> int:
    """The largest number of ids at one position. There is a row for each position except the first, and at least one
    id; all ids are in the vocabulary."""
    if len(targets.starts) != rows + 1:
        raise BadRequest(
            f"target_prompt_logprobs has {len(targets.starts) - 1} rows; the prompt has {rows + 1} tokens, so it "
            f"needs {rows}: row i is for position i + 1"
        )
    tokens = targets.values
    wrong = (tokens < -1) | (tokens >= vocab_size)
    if wrong.any():
        cell = int(wrong.argmax())
        row = int(np.searchsorted(targets.starts, cell, side="right")) - 1
        raise BadRequest(
            f"target_prompt_logprobs in row {row}: token {tokens[cell]} is not in 0..{vocab_size - 1}, and is not -1 "
            "(none)"
        )
    if not (tokens >= 0).any():
        raise BadRequest("target_prompt_logprobs names no token id: name at least one, or leave it out")
    return int(np.diff(targets.starts).max())


def check_size(name: str, width: int, positions: int) -> None:
    """Raises BadRequest if `width` logprobs at each of `positions` positions make the answer too large."""
    if width * positions > MAX_CELLS:
        raise BadRequest(
            f"{name}: {width} at each of {positions} positions are {width * positions} logprobs; one answer holds at "
            f"most {MAX_CELLS}: ask for fewer"
        )
