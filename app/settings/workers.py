"""The settings of a base model, its trainers and its samplers."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from app import ids
from app.domain.prices import Prices
from app.errors import SetupError
from app.settings.gpus import Devices
from app.settings.section import Section

# Shown when the backend "auto" selects transformers on a machine with a GPU.
NO_VLLM = (
    "vLLM is not installed, so the slower transformers sampler is used beside this machine's GPU; for vLLM run "
    '`pip install "tinsmith[vllm]"`, or `make setup GPU=1` in a checkout'
)
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM for CUDA installs. Such a build breaks vLLM's import beside a CPU build of torch."""

_DEVICES = (
    "GPUs by nvidia-smi's numbers, such as [0, 1]; with count = 2, [0, 1] gives each copy one GPU, and [[0, 1], [2, "
    "3]] gives each copy two; empty: `tinsmith up` chooses free ones, if there are any"
)
SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""vLLM's engine arguments that turn on speculative decoding. It then samples from the logits of several tokens at once,
to which workers/backends/sampling/vllm/patches.py applies no grammar."""
_METRICS_PORT = (
    "Prometheus port of the first worker, on every interface; each further copy has the next port; 0: `tinsmith up` "
    "chooses a loopback port for each worker, and keeps it"
)


class TrainerSettings(Section):
    backend: Literal["deepspeed", "torch"] = Field("deepspeed", description="torch is the one-process reference")
    count: int = Field(1, ge=0, description="trainer workers (rank groups) on this machine; 0: none")
    ranks: int = Field(1, ge=1, description="processes in one rank group; more than 1 needs deepspeed")
    sequence_parallel: int = Field(1, ge=1, description="ranks that share a micro-batch's tokens; divides `ranks`")
    tensor_parallel: int = Field(1, ge=1, description="ranks that split the frozen base's layers; divides `ranks`")
    hostfile: str = Field(
        "",
        description="DeepSpeed hostfile (lines 'host slots=n') of the ranks, rank 0 on the first; empty: this machine",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        2, description="DeepSpeed ZeRO stage; 3: a rank holds its share of the base"
    )
    offload: bool = Field(
        False,
        description="keep the base of ZeRO-3 in CPU memory; in full fine-tuning also weights, gradients and optimizer "
        "state",
    )
    devices: Devices = Field((), description=f"one for each rank: {_DEVICES}")
    micro_batch_tokens: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="tokens in one forward/backward pass, which bound its memory; auto: 1024, and on a GPU up to 8192 "
        "(narrow models: 32768) as its memory allows",
    )
    exact: bool | Literal["auto"] = Field(
        "auto",
        description="run each Op in its own pass, so that its bits do not depend on other Ops; auto: true on a CPU",
    )
    merged_tokens: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="most tokens that Ops of other models may add to a pass, unless exact; auto: a micro-batch's, or "
        "8192 if that has fewer",
    )
    merge_wait_s: float = Field(
        0.01,
        ge=0,
        description="time that a shared pass waits for recently active models, or a fifth of the last pass if longer; "
        "0: no wait",
    )
    activation_checkpointing: bool | Literal["auto"] = Field(
        "auto",
        description="run layers again in the backward pass: less memory; counted in operations, a pass takes 1.5 "
        "times as long for LoRA and 1.33 times for full fine-tuning; auto: as many layers as needed",
    )
    fused_kernels: bool = Field(
        True, description="on a GPU, compute norms, rotary embeddings and gates with liger-kernel, if it is installed"
    )
    rank_deadline_s: float = Field(
        600.0, gt=0, description="a rank group restarts after a pass without progress for this long"
    )
    device_models: int = Field(
        0,
        ge=0,
        description="models kept in GPU memory, and the most that share a pass; the others stay in host memory until "
        "their next Op; 0: as many as have room",
    )
    max_models: int = Field(
        64, ge=1, description="models that one trainer holds; the least recently used ones are evicted"
    )
    memory_share: float = Field(1.0, gt=0, le=1, description="share of its GPU's memory that one rank may use")
    metrics_port: int = Field(0, ge=0, le=65535, description=_METRICS_PORT)

    @property
    def gpus_needed(self) -> int:
        """GPUs that one trainer uses."""
        return self.ranks

    @property
    def gpu_share(self) -> float:
        """The part of a GPU's memory that one trainer takes."""
        return self.memory_share

    def slots(self) -> dict[str, int]:
        """Returns the slots of each host of the hostfile, in its order. Raises SetupError unless they are `ranks` in
        all.

        DeepSpeed's own reader would load torch into a process that holds pipes: 300 MB, and seconds at every start.
        """
        file = f"trainer.hostfile {self.hostfile!r}"
        try:
            lines = [line for line in map(str.strip, Path(self.hostfile).read_text().splitlines()) if line]
        except OSError as error:
            raise SetupError(f"{file} cannot be read: {error.strerror}") from None
        hosts: dict[str, int] = {}
        for line in (line for line in lines if line[0] != "#"):
            found = re.fullmatch(r"(\S+)\s+slots=([1-9][0-9]*)", line)
            if found is None or found[1] in hosts:
                raise SetupError(f"{file}: the line {line!r} is not of the form 'host slots=n', or repeats a host")
            hosts[found[1]] = int(found[2])
        if sum(hosts.values()) != self.ranks:
            raise SetupError(
                f"trainer.ranks is {self.ranks} but the hosts of {self.hostfile!r} have {sum(hosts.values())} slots "
                f"({', '.join(f'{host} {slots}' for host, slots in hosts.items()) or 'none'}); make them equal"
            )
        return hosts


class SamplerSettings(Section):
    backend: Literal["auto", "vllm", "transformers"] = Field(
        "auto", description="auto: vllm on a GPU where it is installed, else transformers"
    )
    count: int = Field(1, ge=0, description="sampler workers on this machine; 0: none")
    devices: Devices = Field((), description=f"`tensor_parallel` for each sampler: {_DEVICES}")
    tensor_parallel: int = Field(1, ge=1, description="vLLM tensor parallel size")
    memory_share: float = Field(
        0.85, gt=0, le=1, description="share of GPU memory (of 4 GiB on a CPU) that vLLM may take"
    )
    sleep: bool = Field(
        False,
        description="use the trainer's GPUs in turns with it: vLLM's memory is freed while the trainer computes; needs "
        "backend vllm, one sampler and one trainer",
    )
    max_loras: int = Field(8, ge=1, description="adapters that run at the same time; the others wait for their turns")
    max_batch: int = Field(
        0, ge=0, description="sequences decoded together; 0: 64, or with vLLM on a GPU the number that vLLM chooses"
    )
    queue_requests: int = Field(
        20_000, ge=1, description="most unfinished sampling requests of this base; further ones get 429"
    )
    queue_tokens: int = Field(
        50_000_000,
        ge=1,
        description="most tokens of these requests, prompt + num_samples * max_tokens each; further ones get 429",
    )
    # vLLM decodes 911 sequences at once on an H100; an eighth more is admitted (workers/sample/admission.py).
    concurrency: int = Field(
        1024, ge=1, description="requests that one worker holds at the same time, each in a thread of its own"
    )
    step_deadline_s: float = Field(
        600.0,
        gt=0,
        description="a sampler restarts when its engine runs requests but makes no progress for this long: no token, "
        "and with the transformers sampler no layer",
    )
    cache_bytes: int = Field(
        8 * 2**30,
        ge=0,
        description="unused adapter files are deleted, the least recently used first, while all adapter files on the "
        "disk have more bytes than this",
    )
    engine_args: dict[str, Any] = Field(
        {}, description="further vLLM engine arguments, passed on unchanged; none of speculative decoding"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description=_METRICS_PORT)

    @field_validator("engine_args")
    @classmethod
    def _decodes_one_token_at_a_time(cls, engine_args: dict[str, Any]) -> dict[str, Any]:
        found = [name for name in SPECULATION if engine_args.get(name)]
        if found:
            raise ValueError(
                f"remove {found[0]}: samples under vLLM's speculative decoding would not follow a JSON schema"
            )
        return engine_args

    @property
    def gpus_needed(self) -> int:
        """GPUs that one sampler uses."""
        others = (self.engine_args.get(name) for name in ("pipeline_parallel_size", "data_parallel_size"))
        return self.tensor_parallel * prod(size for size in others if isinstance(size, int))

    @property
    def loaded_loras(self) -> int:
        """Adapters that stay loaded where memory allows: one that comes back within four turns is not read again."""
        return 4 * self.max_loras

    @property
    def gpu_share(self) -> float:
        """The part of a GPU's memory that one sampler takes. vLLM's own argument wins."""
        own = self.engine_args.get("gpu_memory_utilization")
        return own if isinstance(own, (int, float)) else self.memory_share


class BaseModelSettings(Section):
    name: str = Field(description="the name clients ask for, such as Qwen/Qwen3-0.6B")
    path: str = Field(description="a local folder, or a Hugging Face hub id")
    tokenizer: str = Field("", description="path or hub id that clients load their tokenizer from; empty means `path`")
    max_context: int = Field(0, ge=0, description="longest sequence in tokens; 0 means the model's own")
    dtype: Literal["auto", "float32", "bfloat16", "nf4", "int8", "fp8"] = Field(
        "auto",
        description="auto: bfloat16 where it is fast, else float32; nf4, int8, fp8: frozen weights of 4 or 8 bits",
    )
    max_rank: int = Field(128, ge=1, description="highest LoRA rank; vLLM reserves memory for adapters of this rank")
    router_replay: bool = Field(
        False, description="samplers record the experts of each token, and trainers use the same ones"
    )
    weights_id: str = Field(
        "",
        pattern="^([0-9a-f]{16})?$",
        description="id of the weights, as in the workers' logs: serve these weights and no others, also under a name "
        "that had others before",
    )
    prices: Prices = Field(Prices(), description="prices of this base model's usage, in place of those of [prices]")
    trainer: TrainerSettings = Field(TrainerSettings(), description="trainers of LoRA adapters")
    full: TrainerSettings | None = Field(
        None, description="trainers for full fine-tuning, each with one model; none by default"
    )
    sampler: SamplerSettings = Field(SamplerSettings(), description="samplers of the base model and its adapters")
    full_sampler: SamplerSettings | None = Field(
        None,
        description="samplers of fully fine-tuned models, each with one model's weights at a time; none by default",
    )

    @property
    def hub_id(self) -> str:
        """The model's id on the Hugging Face Hub. For a local folder it comes from the name, as in the SDK."""
        is_folder = self.path.startswith(("/", ".", "~")) or Path(self.path).is_dir()
        return ids.hub_id(self.name) if is_folder else self.path

    @property
    def workers(self) -> dict[str, TrainerSettings | SamplerSettings]:
        """The sections of workers that it has, by name."""
        sections: dict[str, TrainerSettings | SamplerSettings | None] = {
            "trainer": self.trainer,
            "full": self.full,
            "sampler": self.sampler,
            "full_sampler": self.full_sampler,
        }
        return {name: section for name, section in sections.items() if section is not None}

    @property
    def quantized(self) -> bool:
        """True when the linears of the base model have 4 or 8 bits."""
        return self.dtype in ("nf4", "int8", "fp8")

    def check_quantized(self) -> None:
        """Raises SetupError when another setting does not go with a quantised base model."""
        split = self.trainer.backend == "deepspeed" and self.trainer.zero_stage == 3
        others = {"trainer.zero_stage = 3": split, "section full": self.full, "section full_sampler": self.full_sampler}
        if self.quantized and (wrong := [name for name, is_set in others.items() if is_set]):
            raise SetupError(
                f"base model {self.name!r}: dtype {self.dtype!r} is for frozen weights that each rank holds whole, and "
                f"does not go with {wrong[0]}; change that, or set dtype to auto"
            )

    def check_tensor_parallel(self) -> None:
        """Raises SetupError when another setting does not go with layers that ranks split."""
        full = self.full is not None and self.full.tensor_parallel > 1
        others = {
            "trainer.sequence_parallel": self.trainer.sequence_parallel > 1,
            "trainer.zero_stage = 3": self.trainer.zero_stage == 3,
            f"dtype {self.dtype!r}": self.quantized,
        }
        wrong = [name for name, is_set in others.items() if is_set and self.trainer.tensor_parallel > 1]
        if wrong or full:
            raise SetupError(
                f"base model {self.name!r}: trainer.tensor_parallel splits a frozen base of 16 or 32 bits, and does "
                f"not go with {wrong[0] if wrong else 'section full'}; change that, or set it to 1"
            )

    def takes_turns(self, *, full: bool) -> bool:
        """True if the trainer and the sampler of adapters, or those of full fine-tunes, use the same GPUs in turns."""
        sampler = self.full_sampler if full else self.sampler
        return sampler is not None and sampler.sleep and sampler.count > 0

    def check_turns(self) -> None:
        """Raises SetupError when a sampler that sleeps has no trainer, or more than one, to take turns with."""
        pairs = (
            (False, "sampler", self.sampler, "trainer", self.trainer),
            (True, "full_sampler", self.full_sampler, "full", self.full),
        )
        for full, name, sampler, other, trainer in pairs:
            if sampler is None or not self.takes_turns(full=full):
                continue
            trainers = 0 if trainer is None else trainer.count
            wrong = {
                f'{name}.backend = "{sampler.backend}"': sampler.backend != "vllm",
                f"{name}.count = {sampler.count}": sampler.count > 1,
                f"{name}.engine_args.enable_sleep_mode": "enable_sleep_mode" in sampler.engine_args,
                f"{other}.count = {trainers}": trainers != 1,
                f"{other}.hostfile": trainer is not None and bool(trainer.hostfile),
            }
            if found := [what for what, is_wrong in wrong.items() if is_wrong]:
                raise SetupError(
                    f"base model {self.name!r}: {name}.sleep is for one sampler with vLLM and one trainer on the same "
                    f"GPUs of one machine, and does not go with {found[0]}; change that, or set {name}.sleep to false"
                )

    def for_full(self) -> BaseModelSettings:
        """The base model's settings for its trainers for full fine-tuning. Raises SetupError when it has no such
        trainers."""
        if self.full is None:
            raise SetupError(f"base model {self.name!r} has no section [base_models.full] in the settings")
        return self.model_copy(update={"trainer": self.full.model_copy(update={"max_models": 1})})

    def for_full_sampler(self) -> BaseModelSettings:
        """The base model's settings for its samplers of fully fine-tuned models. Raises SetupError when it has no such
        samplers."""
        if self.full_sampler is None:
            raise SetupError(f"base model {self.name!r} has no section [base_models.full_sampler] in the settings")
        return self.model_copy(update={"sampler": self.full_sampler})
