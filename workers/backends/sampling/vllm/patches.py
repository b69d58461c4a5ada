"""Repairs of vLLM 0.32: in its worker processes, and in the sampler's own process.

**Prompts in chunks under a seed.** While a prompt is processed in chunks, vLLM samples a token after each chunk, throws
it away, and winds the request's generator back by its offset. CPU generators have no offset, so the engine dies of the
first chunked prompt with a seed, and all our requests have one. Here, a row with a discarded token is sampled without
its generator, which then needs no winding.

**Blocks that held NaN.** CPU attention multiplies the rest of a sequence's last block, after its end, by 0, and 0 times
NaN is NaN: a request fails when it gets a block of a request whose adapter overflowed. vLLM can clear blocks as it
assigns them, and does so for caches of mixed precision alone; here, always.

**lm_head.** vLLM lacks adapters on lm_head for classes that do not declare it (Qwen2 and Mistral), and new weights for
one that is tied. Its LoRA code handles any lm_head that its class names in `embedding_modules`; those classes have one
and just do not name it. A class without an lm_head of its own (Gemma's is the embedding) stays as it is. With a
vocabulary above 258,048 (Gemma 3) a named lm_head ends the start, so none is named.

**Values that are keys.** Gemma 4's layers of full attention may have no `v_proj` (`attention_k_eq_v`): their values are
what `k_proj` gives. vLLM loads the keys' weights for the values too, but leaves them without the adapter on `k_proj`.

**Experts beside adapters on a Blackwell GPU.** With adapters on, vLLM may take a kernel of FlashInfer for experts on a
GPU of compute capability 10.x. It needs adapters on the experts, and our arguments name none, so the start fails.
Without it vLLM takes its Triton kernel, as on other GPUs. (Read in vLLM's code; no such GPU has run it.)

**prompt_logprobs under an adapter on lm_head.** vLLM maps rows of the head's input to adapters by the tokens it
samples, one for each request. To score a prompt it runs the head over a slice of the batch's hidden states with that
same mapping: on a CPU the shapes clash and the engine dies; on a GPU rows silently get another adapter or none. The
slice is a view, so its start gives its tokens in the batch, and vLLM has the adapter of each of those tokens.

**Logprobs under a grammar.** vLLM masks the logits before it computes a sample's logprobs, so a forced token has the
logprob 0 instead of the model's own. Here, the logprobs are computed from logits without the mask. Both of its samplers
are covered: the CPU has the first, a GPU the second. Speculative decoding has a third, so the settings refuse it
(`SPECULATION`).

**Unread pieces of a streamed answer**, in the sampler's own process. vLLM joins them into one piece, and keeps each
position's logprobs in a dict meanwhile. A sampled token that is also among the likeliest is in the dict only once, so
that position has an entry less than it should.

**Stop strings after a prompt that ends in half a character**, in the sampler's own process. With the character's end
vLLM takes all of the prompt's text for the sample's text, and stops at a stop string it finds there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial, wraps
from typing import Any

import numpy as np
import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from workers.backends.sampling.vocabulary import seen

_MASK = "tinsmith_mask"
MOST_HEAD_TOKENS = 258_048
"""The largest vocabulary whose head vLLM takes adapters on (LogitsProcessorWithLoRA of vLLM 0.32)."""


def repair_cpu() -> None:
    """Repairs vLLM's model runner for CPUs."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    _keep_generators(CPUModelRunner)
    _clear_blocks(CPUModelRunner)


def _keep_generators(runner: Any) -> None:
    sample_tokens = runner.sample_tokens

    def sample_tokens_without(self: Any, *args: Any) -> Any:
        generators = self.input_batch.generators
        discarded = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        kept_out = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            return sample_tokens(self, *args)
        finally:
            generators.update(kept_out)

    runner.sample_tokens = sample_tokens_without


def _clear_blocks(runner: Any) -> None:
    update_states = runner._update_states

    def update_states_on_clear_blocks(self: Any, scheduled: Any) -> Any:
        self._zero_block_ids(new_blocks(scheduled, self.cache_config.block_size))
        return update_states(self, scheduled)

    runner._update_states = update_states_on_clear_blocks


def new_blocks(scheduled: Any, size: int) -> list[int]:
    """Returns the cache blocks of `size` tokens that a step's requests receive and have not filled before.

    A request that starts, or comes back, receives the list of all its blocks: the first may be from the prefix cache.
    """
    given = [(new.block_ids, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
    running = scheduled.scheduled_cached_reqs
    for request_id, groups, computed in zip(
        running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
    ):
        given.append((groups or (), computed if request_id in running.resumed_req_ids else 0))
    return [block for groups, computed in given for blocks in groups for block in blocks[computed // size :]]


def declare_lm_heads() -> None:
    """Makes vLLM name lm_head in models that have one, before it looks for modules that adapters can sit on."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    load = LoRAModelRunnerMixin.load_lora_model

    def load_lora_model(self: Any, model: Any, *args: Any) -> Any:
        if hasattr(model, "lm_head") and hasattr(model, "logits_processor"):
            others = {name: kind for name, kind in model.embedding_modules.items() if name != "lm_head"}
            head = {"lm_head": "output_embeddings"} if model.logits_processor.vocab_size <= MOST_HEAD_TOKENS else {}
            model.embedding_modules = {**others, **head}
        return load(self, model, *args)

    LoRAModelRunnerMixin.load_lora_model = load_lora_model


def renew_lm_head(model: Any) -> None:
    """Updates a tied lm_head after new weights: it has no weights of its own, so vLLM passes it over.

    It shares the embedding's parameter, but on a CPU it computes with a copy of that, packed for its kernel.
    """
    if model.config.tie_word_embeddings and hasattr(model, "lm_head"):
        method = getattr(model.lm_head, "quant_method", None)  # a rank of a pipeline may have a stand-in for it
        if method is not None:
            method.process_weights_after_loading(model.lm_head)


def adapt_shared_values() -> None:
    """Makes vLLM add the adapter on `k_proj` to the values too, in layers where they are the keys."""
    from vllm.lora.model_manager import LoRAModelManager

    merge = LoRAModelManager._create_merged_loras_inplace

    def merge_with_values(self: Any, adapter: Any) -> None:
        for _, keys, values in _with_values_of_keys(self):
            if pair := adapter.get_lora(keys):
                adapter.loras[values] = pair
        merge(self, adapter)

    LoRAModelManager._create_merged_loras_inplace = merge_with_values


def _with_values_of_keys(manager: Any) -> list[Sequence[str]]:
    """The names of q_proj, k_proj and v_proj in the layers whose values are their keys."""
    config = manager.model.config.get_text_config()
    if not getattr(config, "attention_k_eq_v", False):
        return []
    layers = (number for number, kind in enumerate(config.layer_types) if kind == "full_attention")
    ends = tuple(f".layers.{number}.self_attn.qkv_proj" for number in layers)
    return [parts for linear, parts in manager.packed_modules.items() if linear.endswith(ends)]


def refuse_lora_experts() -> None:
    """Makes vLLM take no kernel for experts that needs adapters on them."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    unquantized._trtllm_bf16_lora_supported = lambda *_: False


def repair_prompt_scores() -> None:
    """Makes vLLM's LoRA kernels add the right adapter to scored prompt tokens."""
    from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    kernels: list[type[PunicaWrapperBase]] = [PunicaWrapperCPU, PunicaWrapperGPU]
    for wrapper in kernels:
        _repair(wrapper)


def _repair(wrapper: Any) -> None:
    sampled = wrapper.add_lora_logits

    def add_lora_logits(
        self: Any, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: Any
    ) -> Any:
        if not is_slice(x, len(self.sampler_indices)):
            return sampled(self, y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs)
        first = x.storage_offset() // x.stride(0)
        add_by_row(y, x, lora_a_stacked, lora_b_stacked, self.token_lora_indices[first : first + len(x)])
        return y

    wrapper.add_lora_logits = add_lora_logits


def is_slice(hidden: Tensor, sampled: int) -> bool:
    """Returns whether rows [n, H] are a slice of the batch, and not a copy of the `sampled` rows that are sampled from.

    A copy fills its memory. A slice fills its memory only when it is the whole batch. It then has `sampled` rows only
    when every token is sampled from, and the two mean the same.
    """
    return len(hidden) != sampled or hidden.untyped_storage().nbytes() != hidden.numel() * hidden.element_size()


def add_by_row(logits: Tensor, hidden: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> None:
    """Adds each row's adapter in place: logits [n, W], hidden [n, H], a [S, 1, r, H], b [S, 1, V, r], slots [n].

    A slot of -1 is no adapter. The scaling is part of b.
    """
    # vLLM pads the head's rows to a multiple of 64 and b's not, and cuts off the logits of the padding later: W >= V.
    logits = logits[:, : b.shape[2]]
    for slot in sorted(set(slots.tolist())):
        if slot >= 0:
            rows = slots == slot
            low = hidden[rows].to(torch.float32) @ a[slot, 0].to(torch.float32).t()
            logits[rows] += (low @ b[slot, 0].to(torch.float32).t()).to(logits.dtype)


def repair_logprobs_under_grammar() -> None:
    """Makes vLLM's samplers mask logits by a grammar after the logprobs are safe."""
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu.sample.sampler import Sampler as SecondSampler
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    _mask_behind_logprobs(gpu_model_runner, Sampler)
    _mask_a_copy(StructuredOutputsWorker, SecondSampler)


def _mask_behind_logprobs(runner: Any, sampler: Any) -> None:
    """The first sampler computes all logprobs of the model before it changes the logits. All our requests have some."""
    apply, compute = runner.apply_grammar_bitmask, sampler.compute_logprobs

    def keep_mask(scheduled: Any, grammar: Any, batch: Any, logits: Tensor) -> None:
        vars(logits)[_MASK] = partial(apply, scheduled, grammar, batch)

    def compute_then_mask(logits: Tensor) -> Tensor:
        logprobs: Tensor = compute(logits)
        if mask := vars(logits).pop(_MASK, None):
            mask(logits)
        return logprobs

    runner.apply_grammar_bitmask, sampler.compute_logprobs = keep_mask, staticmethod(compute_then_mask)


def _mask_a_copy(worker: Any, sampler: Any) -> None:
    """The second sampler computes logprobs from the logits that it has sampled from."""
    apply, sample = worker.apply_grammar_bitmask, sampler.sample

    def keep_mask(self: Any, logits: Tensor, *args: Any) -> None:
        vars(logits)[_MASK] = lambda copy: apply(self, copy, *args)

    def sample_from_copy(self: Any, logits: Tensor, *args: Any, **named: Any) -> Any:
        if mask := vars(logits).pop(_MASK, None):
            logits = logits.clone()
            mask(logits)
        return sample(self, logits, *args, **named)

    worker.apply_grammar_bitmask, sampler.sample = keep_mask, sample_from_copy


@cache
def repair_pieces() -> None:
    """Makes vLLM join pieces unchanged, without a dict. Called once a process."""
    from vllm.logprobs import FlatLogprobs

    extend = FlatLogprobs.extend

    @wraps(extend)
    def extend_whole(self: Any, more: Any) -> None:
        if not isinstance(more, FlatLogprobs):
            extend(self, more)
            return
        behind = len(self.logprobs)
        self.start_indices += [behind + start for start in more.start_indices]
        self.end_indices += [behind + end for end in more.end_indices]
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.ranks += more.ranks
        self.decoded_tokens += more.decoded_tokens

    FlatLogprobs.extend = extend_whole


@cache
def repair_stops() -> None:
    """Makes vLLM begin after such a prompt as StopText does. Called once a process."""
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    _begin_behind_prompts(FastIncrementalDetokenizer)


def _begin_behind_prompts(detokenizer: Any) -> None:
    begin = detokenizer.__init__

    @wraps(begin)
    def begin_behind_prompt(self: Any, tokenizer: Any, request: Any) -> None:
        begin(self, tokenizer, request)
        if not seen(self.tokenizer, request.prompt_token_ids):
            self.stream = DecodeStream(skip_special_tokens=self.skip_special_tokens)

    detokenizer.__init__ = begin_behind_prompt
