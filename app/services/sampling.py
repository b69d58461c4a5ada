"""Samplers (sampling sessions) and the sampling requests on them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from app import ids
from app.domain import records
from app.domain.accounts import Caller
from app.domain.records import Sampler, Session
from app.domain.sampling import Cells, SampleRequest
from app.errors import BadRequest
from app.services.admission import AdmissionService, QuotaService
from app.services.base_models import BaseModels, sampler_role
from app.services.tenants.access import load_checkpoint, load_owned, load_readable
from app.services.validation.sampling import check_sample
from app.services.validation.training import check_adapter, check_sampleable, check_sampled_role
from app.stores.redis.records import RedisRecords
from app.wire.forward_backward import to_cells
from app.wire.json_forms import tensor, text_tokens

TARGETS = "target_prompt_logprobs"


class SamplingService:
    """Creates samplers and admits sampling requests. A sampler names immutable weights, so its requests need no order
    and can safely run again."""

    def __init__(
        self, store: RedisRecords, bases: BaseModels, admission: AdmissionService, quotas: QuotaService
    ) -> None:
        self._records = store
        self._quotas = quotas
        self._bases = bases
        self._admission = admission

    def create_session(self, caller: Caller, asked: Mapping[str, Any]) -> str:
        """Creates a sampler for a base model or a checkpoint, and returns its id; a repeat returns the same id.

        Raises NotFound (session, checkpoint), BadRequest, or Unavailable while there is no room for another sampler.
        """
        session = load_owned(self._records, Session, asked["session_id"], caller)
        if asked.get("model_path") is None and asked.get("base_model") is None:
            raise BadRequest("create_sampling_session needs model_path or base_model")
        sampler_id = ids.sampling_session_id(asked["session_id"], asked["sampling_session_seq_id"])
        if not self._is_there(sampler_id, asked):
            base, path = asked.get("base_model"), asked.get("model_path")
            sampler = self.resolve(caller, session.owner, asked["session_id"], base, path)
            self._quotas.take(caller, session.owner)
            if not self._records.put_new(Sampler.namespace, sampler_id, records.dump(sampler)):
                self._is_there(sampler_id, asked)
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
        sampler_id, seq = asked["sampling_session_id"], asked["seq_id"]
        sampler = load_owned(self._records, Sampler, sampler_id, caller)
        info = self._bases.info(sampler_role(full=sampler.full), sampler.base_model)
        request_id = ids.request_id(sampler_id, seq)
        request = _request(asked, ids.stable_seed(request_id), info.max_context)
        check_sample(request, info)
        self._admission.admit_sample(caller, sampler_id, sampler, seq, request)
        names = [f"{request_id}-{i}" for i in range(request.num_samples)]
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
        return Sampler(owner, session_id, name, time.time(), path, prefix, full=full)

    def _is_there(self, sampler_id: str, asked: Mapping[str, Any]) -> bool:
        """True if the sampler exists already; a repeat finds it even if the checkpoint has been deleted since. Raises
        BadRequest if the id belongs to a different sampler."""
        stored = self._records.get(Sampler.namespace, sampler_id)
        if stored is None:
            return False
        there = records.load(Sampler, stored)
        ephemeral = there.prefix and not there.model_path
        same = there.model_path == (asked.get("model_path") or "")
        if ephemeral or not same or asked.get("base_model") not in (None, there.base_model):
            raise BadRequest(
                f"sampling_session_seq_id {asked['sampling_session_seq_id']} was already used for another sampler; "
                "use a new one"
            )
        return True


def _request(asked: Mapping[str, Any], seed: int, max_context: int) -> SampleRequest:
    """The decoded sampling request. The context length caps `max_tokens`, and the rest of the context is its
    default."""
    params = asked["sampling_params"]
    prompt = text_tokens(asked["prompt"]["chunks"], "prompt")
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
    raise BadRequest("sampling_params.stop must be a string, a list of strings or a list of token ids")
