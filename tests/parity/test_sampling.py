"""What a sampler says of the tokens it sampled, against what the trainer whose weights it has says of them."""

from __future__ import annotations
