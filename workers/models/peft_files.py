"""Adapters on disk, in the format of the `peft` library."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.domain.adapters import KEY_PREFIX
from app.domain.ops import LoraSpec
from app.errors import UserOpError
from workers.backends.training.base import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from workers.models import experts, target_modules
from workers.models.adapter import SCORE, SCORE_KEY, Adapter, LoraPair


def write(adapter: Adapter, folder: Path, base_model_name: str, model: nn.Module | None = None) -> None:
    """Writes `adapter` as PEFT's two files. On a tied head the pair belongs to the head alone; the embedding has none.

    A critic is stored as a sequence classifier with one label. `model`, wrapped or bare, is where the adapter belongs.
    An adapter on experts needs it; the modules of another one are named by their last names alone without it.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "r": adapter.spec.rank,
        "lora_alpha": adapter.spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": _target_modules(adapter, model),
    }
    if parameters := _target_parameters(adapter, model):
        config["target_parameters"] = parameters
    if adapter.critic:
        config |= {"task_type": "SEQ_CLS", "modules_to_save": [SCORE]}
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2))
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in adapter.tensors.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})


def _target_parameters(adapter: Adapter, model: nn.Module | None) -> list[str]:
    """The tensors that PEFT adapts as tensors: the experts, and the weights of dense or shared MLPs beside them.

    Named as modules, PEFT 0.21 takes them for experts of an older layout, and doubles the rank of the experts.
    """
    if not any(experts.is_pair(path) for path in adapter.pairs):
        return []
    assert model is not None, "the names of its experts are the model's"
    return [
        *experts.target_parameters(model),
        *(f"{path}.weight" for path in adapter.pairs if target_modules.is_mlp(path)),
    ]


def _target_modules(adapter: Adapter, model: nn.Module | None) -> list[str]:
    """The last names of the adapter's modules; or their whole paths, where a last name alone would also name another
    module, such as one of a vision tower, on which PEFT would put an adapter too."""
    as_tensors = {name.removesuffix(".weight") for name in _target_parameters(adapter, model)}
    paths = [path for path in adapter.pairs if not experts.is_pair(path) and path not in as_tensors]
    leaves = {_leaf(path) for path in paths}
    others = () if model is None else (path for path, _ in model.named_modules() if path not in adapter.pairs)
    return sorted(paths if any(_leaf(path) in leaves for path in others) else leaves)


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def read(folder: Path) -> Adapter:
    """Reads the adapter in `folder`, on the CPU, in its own dtype. Its spec's seed is 0, as nothing is sampled from it
    any more.

    Raises UserOpError when the files are missing, damaged, or use PEFT features other than plain LoRA and a critic's
    value head.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
        stored = load_file(folder / ADAPTER_FILE)
        head = nn.Parameter(stored.pop(SCORE_KEY)) if config.get("modules_to_save") else None
        return Adapter(_spec_of(config), _pairs_of(stored, int(config["r"])), head)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserOpError(f"{folder.name} holds no plain LoRA adapter in PEFT files: {error}") from None


def paths(folder: Path) -> list[str]:
    """The modules that the adapter in `folder` has tensors for, in the file's order. Reads the file's header alone.

    Raises OSError or SafetensorError when the file is missing or damaged.
    """
    with safe_open(folder / ADAPTER_FILE, "pt") as file:
        names = file.keys()
    return list(dict.fromkeys(name.removeprefix(KEY_PREFIX).partition(".lora_")[0] for name in names))


def _spec_of(config: dict[str, object]) -> LoraSpec:
    modules = config["target_modules"]
    if not isinstance(modules, list) or not isinstance(config["lora_alpha"], int | float):
        raise ValueError("target_modules must be a list and lora_alpha a number")
    leaves = {_leaf(str(name)) for name in modules}
    attn, mlp, unembed = (any(_leaf(name) in leaves for name in names) for names in target_modules.GROUPS.values())
    mlp = mlp or bool(config.get("target_parameters"))
    return LoraSpec(int(str(config["r"])), attn, mlp, unembed, alpha=config["lora_alpha"])


def _pairs_of(stored: dict[str, Tensor], rank: int) -> dict[str, LoraPair]:
    paths = [key[len(KEY_PREFIX) : -len(".lora_A.weight")] for key in stored if key.endswith(".lora_A.weight")]
    pairs = {}
    for path in paths:
        a = stored.pop(f"{KEY_PREFIX}{path}.lora_A.weight")
        b = stored.pop(f"{KEY_PREFIX}{path}.lora_B.weight")
        wanted = a.shape[0] if experts.is_pair(path) and a.shape[0] % rank == 0 else rank
        if a.shape[0] != wanted or b.shape[1] != wanted:
            raise ValueError(f"{path} has shapes {list(a.shape)} and {list(b.shape)}, which do not have rank {rank}")
        pairs[path] = LoraPair(nn.Parameter(a), nn.Parameter(b))
    if stored:
        raise ValueError(f"unknown tensor {next(iter(stored))}")
    return pairs
