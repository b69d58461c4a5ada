"""`python -m workers.models.report SOURCE`: prints the parts of a base model that LoRA adapters cover, as JSON.

SOURCE is a folder or a hub id. The model has no weights (the meta device): its config is read, and of a folder the
headers of its weight files.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from app.errors import TinsmithError
from app.settings import BaseModelSettings


def report(source: str) -> dict[str, Any]:
    """Raises SetupError as `skeleton` does, and UnservableModel as `check_adaptable` does."""
    import torch

    from workers.models import base_model

    settings = BaseModelSettings(name=source, path=source)
    never = base_model.check_adaptable(settings).never
    model = base_model.skeleton(settings)
    info = base_model.describe(settings, model, torch.float32)
    return {
        "architecture": info.arch,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "max_context": info.max_context,
        "trainable_groups": list(info.trainable_groups),
        "never_adapted": dict(never),
    }


if __name__ == "__main__":
    try:
        print(json.dumps(report(sys.argv[1])))
    except TinsmithError as error:
        sys.exit(str(error))
