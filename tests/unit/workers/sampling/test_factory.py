from __future__ import annotations

import subprocess
import sys

import pytest

from app.errors import SetupError
from app.settings import BaseModelSettings, SamplerSettings
from workers.sampling.factory import create


def settings(backend: str, path: str = "x") -> BaseModelSettings:
    return BaseModelSettings(name="tiny", path=path, sampler=SamplerSettings(backend=backend))


def test_the_sampler_is_the_one_the_settings_name_and_auto_means_transformers_on_a_cpu():
    names = {backend: type(create(settings(backend))).__name__ for backend in ("auto", "transformers", "vllm")}
    assert names == {"auto": "TransformersSampler", "transformers": "TransformersSampler", "vllm": "VllmSampler"}


def test_the_factory_alone_loads_no_heavy_library():
    code = "import sys, workers.sampling.factory; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_a_missing_model_is_a_setup_error_that_names_the_path(backend, tmp_path):
    with pytest.raises(SetupError, match="nowhere"):
        create(settings(backend, str(tmp_path / "nowhere"))).open()
