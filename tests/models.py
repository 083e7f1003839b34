"""Six models as people write them, small. Each comes with a function that makes a batch."""

import torch
import torch.nn.functional as F
from torch import nn

from fxsplit.demo.gpt import GPT


class Residual(nn.Module):
    def __init__(self, channels_in, channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 5)

    def forward(self, image):
        x = self.stem(image)
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.pool(x), 1))


class UNet(nn.Module):
    """Long skips: the first stage's values are read by the last."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(
            [nn.Conv2d(2, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 1, 1)]
        )
        self.up = nn.ModuleList([nn.Conv2d(32, 16, 3, 1, 1), nn.Conv2d(24, 8, 3, 1, 1)])
        self.head = nn.Conv2d(10, 2, 1)

    def forward(self, image):
        skips = [image]
        x = image
        for i, conv in enumerate(self.down):
            x = torch.relu(conv(x))
            if i < 2:
                skips.append(x)
                x = F.max_pool2d(x, 2)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = torch.relu(conv(torch.cat([x, skips.pop()], 1)))
        return self.head(torch.cat([x, skips.pop()], 1))


class TwoTower(nn.Module):
    """Two independent branches, a dict in and a dict out, one output that is not read again."""

    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.item = nn.Sequential(nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch, temperature=1.0):
        q = F.normalize(self.query(batch["query"]), dim=-1)
        i = F.normalize(self.item(batch["item"]), dim=-1)
        score = (q * i).sum(-1) * self.scale / temperature
        return {"score": score, "towers": (q, i)}


class TiedHead(nn.Module):
    """The embedding's weight is used three times: embedding, functional read, head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4)
        )
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x + F.linear(F.linear(x, self.embed.weight), self.embed.weight.t())
        return self.head(x)


class Experts(nn.Module):
    """A router that sends each token to one expert: what it computes depends on the values, so it stays whole."""

    def __init__(self, width, experts):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x):
        flat = x.flatten(0, -2)
        weight, choice = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            if rows.numel() > 0:
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return out.view_as(x)


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.mixtures = nn.ModuleList(Experts(8, 3) for _ in range(3))
        self.head = nn.Linear(8, 12)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x = x + mixture(norm(x))
        return self.head(x)


def tokens(rows, length=9, vocabulary=12):
    return (torch.randint(vocabulary, (rows, length)),)


MODELS = {
    "gpt": (lambda: GPT(12, width=16, layers=3, heads=2, context=16), tokens),
    "resnet": (ResNet, lambda rows: (torch.randn(rows, 3, 8, 8),)),
    "unet": (UNet, lambda rows: (torch.randn(rows, 2, 8, 8),)),
    "two_tower": (
        TwoTower,
        lambda rows: ({"query": torch.randn(rows, 6), "item": torch.randint(20, (rows,))},),
    ),
    "tied_head": (TiedHead, tokens),
    "experts": (MixtureOfExperts, tokens),
}


def build(name):
    make, batch = MODELS[name]
    torch.manual_seed(0)
    return make(), batch
