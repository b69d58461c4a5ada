"""What a sampler says of the tokens it sampled, against what the trainer whose weights it has says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from app.domain.batch import Batch, Ragged
from app.domain.ops import ForwardBackward
from app.domain.sampling import SampleRequest
from app.settings import BaseModelSettings, SamplerSettings
from tests.models import tiny_qwen3
from tests.parity.datums import batch, supervised
from tests.parity.training import LENGTHS, STEP, apply, open_trainer, run
from workers.sampling.factory import create
from workers.training.trainer import Trainer
