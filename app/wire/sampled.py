"""A sampling future's bytes, read again: the inverse of results.encode_sample."""

from __future__ import annotations

import numpy as np

from app.domain.sampling import SampledSequence, SampleOutput, TokenLogprobs
from app.wire import tinker_pb2 as pb


def decode_sample(body: bytes) -> SampleOutput:
    """Without prompt_targets and prompt_alternatives. Raises google.protobuf.message.DecodeError."""
    message = pb.SampleResponse.FromString(body)
    scores = message.prompt_logprobs if message.HasField("prompt_logprobs") else None
    return SampleOutput(
        tuple(_sequence(sequence) for sequence in message.sequences),
        None if scores is None else np.frombuffer(scores, "<f4"),
        prompt_top=_top(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None,
    )


def _sequence(sequence: pb.SampledSequence) -> SampledSequence:
    return SampledSequence(
        np.frombuffer(sequence.tokens, "<i4"),
        np.frombuffer(sequence.logprobs, "<f4"),
        sequence.stop_reason == pb.STOP_REASON_STOP,
        _top(sequence.topk_sampled_logprobs) if sequence.HasField("topk_sampled_logprobs") else None,
    )


def _top(found: pb.TopkLogprobs) -> TokenLogprobs:
    shape = (found.length, found.k)
    return TokenLogprobs(
        np.frombuffer(found.token_ids, "<i4").reshape(shape), np.frombuffer(found.logprobs, "<f4").reshape(shape)
    )
