"""Models that are sequences of children, each with one batch and its target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

loss_of = nn.functional.mse_loss


@dataclass
class Task:
    """A model that is a sequence of children, and one batch."""

    model: nn.Sequential
    x: torch.Tensor
    target: torch.Tensor

    def equal_parts(self, parts: int = 2) -> list[int]:
        """How many children each of equal parts has."""
        return [len(self.model) // parts] * parts


def transformer(layers: int, quick: bool = False, length: int = 64) -> Task:
    """Encoder layers of width 256, 4 heads, feed-forward 512, no dropout; 64 rows of 64 tokens."""
    torch.manual_seed(0)
    width, rows, length = (16, 16, 4) if quick else (256, 64, length)
    sizes = {"d_model": width, "nhead": 4, "dim_feedforward": 2 * width, "dropout": 0.0, "batch_first": True}
    model = nn.Sequential(*(nn.TransformerEncoderLayer(**sizes) for _ in range(layers)))
    return Task(model, torch.randn(rows, length, width), torch.randn(rows, length, width))


def small_operations(layers: int = 100) -> Task:
    """Linear layers of width 64, each with a ReLU; 512 rows."""
    torch.manual_seed(0)
    children = (child for _ in range(layers) for child in (nn.Linear(64, 64), nn.ReLU()))
    return Task(nn.Sequential(*children), torch.randn(512, 64), torch.randn(512, 64))
