from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch

from app.errors import SetupError, UnservableModel
from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.parity import architectures
from workers.backends.sampling import vllm
from workers.backends.sampling.vllm.arguments import engine_args
from workers.backends.sampling.vllm.backend import VllmSampler
from workers.backends.sampling.vllm.checks import (
    check_dtype,
    check_experts,
    check_head_sizes,
    check_install,
    check_latent_attention,
    check_query_scaling,
    check_rotary_order,
)
from workers.backends.sampling.vllm.engine import set_environment
from workers.backends.sampling.vllm.worker import SAMPLER_PID_VARIABLE
from workers.models import base_model


def install(site: Path, package: str, version: str) -> None:
    info = site / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def test_a_sound_install_passes():
    check_install()


@pytest.mark.parametrize("package", ["torchvision", "torchaudio", "torchcodec"])
def test_a_cuda_build_beside_a_cpu_torch_is_refused_with_the_remedy(package, tmp_path, monkeypatch):
    install(tmp_path, package, "0.28.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SetupError, match=f"{package}.*pip uninstall -y torchvision torchaudio torchcodec"):
        check_install()


def test_a_cpu_build_beside_it_is_fine(tmp_path, monkeypatch):
    install(tmp_path, "torchvision", "0.28.0+cpu")
    (tmp_path / "torchaudio-2.13.0.dist-info").mkdir()  # as after an install that broke off
    monkeypatch.syspath_prepend(tmp_path)
    check_install()


def test_a_build_for_cuda_without_a_gpu_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_install()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SetupError, match=r"vLLM's build for CUDA needs a GPU.*set sampler\.backend to transformers"):
        check_install()


def test_a_vllm_that_cannot_be_imported_is_a_setup_error_that_names_the_cause(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so.99: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)  # a build for CUDA asks for a GPU before
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.delenv(SAMPLER_PID_VARIABLE, raising=False)  # left by another test, it names a sampler to end with
    # Imported anew, they must not need vLLM either.
    for name in ("checks", "engine", "worker"):
        monkeypatch.delitem(sys.modules, f"{vllm.__name__}.{name}")
        monkeypatch.setattr(vllm, name, None)
    import_module(f"{vllm.__name__}.engine")
    checks = import_module(f"{vllm.__name__}.checks")
    checks.check_install()
    with pytest.raises(SetupError, match=r"vLLM is installed but cannot be imported: libcudart\.so\.99: cannot open"):
        checks.check_import()


@pytest.mark.parametrize(("length", "set_to"), [(70, None), (71, "/tmp")])
def test_vllms_sockets_have_names_that_fit_in_whatever_folder_is_for_temporary_files(length, set_to, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * (length - 1))
    monkeypatch.setattr(os, "environ", {})
    set_environment(BaseModelSettings(name="n", path="~/m"))
    assert os.environ.get("VLLM_RPC_BASE_PATH") == set_to


@pytest.mark.parametrize("own", [None, "1"])
def test_flashinfers_sampler_which_nvcc_compiles_is_off_unless_the_operator_turns_it_on(own, monkeypatch):
    monkeypatch.setattr(os, "environ", {"VLLM_USE_FLASHINFER_SAMPLER": own} if own else {})
    set_environment(BaseModelSettings(name="n", path="~/m"))
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == (own or "0")


@pytest.mark.parametrize(("gpu", "own", "set_to"), [(False, None, "1"), (False, "0", "0"), (True, None, None)])
def test_nothing_is_compiled_on_a_cpu_unless_the_operator_wants_it(gpu, own, set_to, monkeypatch):
    monkeypatch.setattr(os, "environ", {"TORCH_COMPILE_DISABLE": own} if own else {})
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    set_environment(BaseModelSettings(name="n", path="~/m"))
    assert os.environ.get("TORCH_COMPILE_DISABLE") == set_to


@pytest.mark.parametrize("case", ["qwen3", "qwen3-moe", "llama4"])
def test_a_model_with_experts_is_refused_on_a_cpu(case: str, tmp_path: Path) -> None:
    settings = BaseModelSettings(name="n", path=str(architectures.build(case, tmp_path)))
    skeleton = base_model.skeleton(settings)
    if case == "qwen3":
        check_experts(settings, skeleton)
        return
    with pytest.raises(UnservableModel, match=r"'n' has experts.* set sampler\.backend to transformers"):
        check_experts(settings, skeleton)


@pytest.mark.parametrize("case", ["ministral3", "llama", "gemma4"])
def test_a_context_where_vllm_would_not_scale_queries_is_refused(case: str, tmp_path: Path) -> None:
    settings = BaseModelSettings(name="n", path=str(architectures.build(case, tmp_path)))
    skeleton = base_model.skeleton(settings)
    check_query_scaling(settings, skeleton, 8)
    if case != "ministral3":
        check_query_scaling(settings, skeleton, 9)
        return
    with pytest.raises(UnservableModel, match=r"'n' scales queries beyond position 8.* max_context to at most 8"):
        check_query_scaling(settings, skeleton, 9)


@pytest.mark.parametrize(
    "case", ["llama", "gemma4", "gemma4, vision", "qwen3.5", "qwen3-vl", "mistral3", "deepseek-v3"]
)
def test_a_head_of_a_size_that_vllms_cpu_kernels_lack_is_refused(case: str, tmp_path: Path) -> None:
    # Qwen3-VL's and Mistral 3's towers have heads of 16, and so have Qwen3.5's Gated DeltaNet and DeepSeek's latent
    # attention, which run in other kernels.
    settings = BaseModelSettings(name="n", path=str(architectures.build(case, tmp_path, head_dim=32)))
    skeleton = base_model.skeleton(settings)
    if not case.startswith("gemma4"):
        check_head_sizes(settings, skeleton)
        return
    with pytest.raises(UnservableModel, match=r"'n' has attention heads of size 16, and .* 32, 64, 80.* transformers"):
        check_head_sizes(settings, skeleton)


@pytest.mark.parametrize("case", ["deepseek-v3", "deepseek-v3.2", "glm4-moe-lite", "kimi-linear", "glm4-moe", "qwen3"])
def test_latent_attention_is_refused_on_a_cpu(case: str, tmp_path: Path) -> None:
    settings = BaseModelSettings(name="n", path=str(architectures.build(case, tmp_path)))
    skeleton = base_model.skeleton(settings)
    for full in (False, True):
        if case in ("glm4-moe", "qwen3"):
            check_latent_attention(settings, skeleton, full=full)
            continue
        with pytest.raises(UnservableModel, match=r"'n' has latent attention.* set sampler\.backend to transformers"):
            check_latent_attention(settings, skeleton, full=full)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", ["deepseek-v3", "glm4-moe-lite", "kimi-linear", "glm4-moe"])
def test_latent_attention_is_refused_on_a_gpu_only_with_adapters(case: str, tmp_path: Path) -> None:
    """vLLM would leave their pairs on kv_b_proj out of the computation, without a word."""
    settings = BaseModelSettings(name="n", path=str(architectures.build(case, tmp_path)))
    skeleton = base_model.skeleton(settings)
    check_latent_attention(settings, skeleton, full=True)
    if case == "glm4-moe":
        check_latent_attention(settings, skeleton, full=False)
        return
    with pytest.raises(UnservableModel, match=r"'n' has latent attention, where vLLM leaves out adapters on kv_b_proj"):
        check_latent_attention(settings, skeleton, full=False)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", ["llama4", "llama"])
def test_adapters_on_llama_4_are_refused_also_on_a_gpu(case: str, tmp_path: Path) -> None:
    settings = BaseModelSettings(name="n", path=str(architectures.build(case, tmp_path)))
    skeleton = base_model.skeleton(settings)
    if case == "llama":
        check_rotary_order(settings, skeleton)
        return
    with pytest.raises(UnservableModel, match=r"'n' is a Llama 4.* set sampler\.backend to transformers"):
        check_rotary_order(settings, skeleton)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("case", "said"), [("llama4", "is a Llama 4"), ("deepseek-v3", "latent attention, where")])
def test_a_model_whose_adapters_vllm_would_misplace_ends_the_sampler_at_its_start(
    case: str, said: str, tmp_path: Path
) -> None:
    settings = BaseModelSettings(name="n", path=str(architectures.build(case, tmp_path)), max_rank=8)
    with pytest.raises(UnservableModel, match=said):
        VllmSampler(settings).open()


@pytest.mark.parametrize(("case", "said"), [("gemma4", "heads of size 16"), ("deepseek-v3", "latent attention")])
def test_such_a_model_ends_the_sampler_at_its_start(case: str, said: str, tmp_path: Path) -> None:
    settings = BaseModelSettings(name="n", path=str(architectures.build(case, tmp_path, head_dim=32)), max_rank=8)
    for full in (False, True):
        with pytest.raises(UnservableModel, match="has experts" if case == "deepseek-v3" and not full else said):
            VllmSampler(settings, full=full).open()


@pytest.mark.parametrize(
    ("gpu", "dtype", "full", "said"),
    [
        ((9, 0), "float32", False, r"'n' has dtype float32.* set dtype to auto or bfloat16, or sampler\.backend"),
        ((9, 0), "float32", True, None),
        ((8, 0), "bfloat16", False, None),
        ((7, 5), "bfloat16", True, r"'n' has dtype bfloat16.* below 8.0: set sampler\.backend to transformers"),
        (None, "float32", False, None),
    ],
)
def test_a_dtype_that_vllm_does_not_run_on_the_gpu_is_refused(
    gpu: tuple[int, int] | None,
    dtype: str,
    full: bool,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpu is not None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: gpu)
    settings = BaseModelSettings(name="n", path=str(tiny_qwen3(tmp_path)))
    arguments = engine_args(settings, base_model.skeleton(settings), 100, dtype, full=full)
    with pytest.raises(UnservableModel, match=said) if said else nullcontext():
        check_dtype(settings, arguments)


def test_a_sampler_in_float32_ends_at_its_start_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BaseModelSettings(name="n", path=str(tiny_qwen3(tmp_path)), dtype="float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnservableModel, match="'n' has dtype float32"):
        VllmSampler(settings).open()
