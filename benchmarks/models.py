"""Published architectures of the libraries that are installed, with random weights: at real sizes, and tiny.

A factory returns the model and its inputs; those of `LARGE` are called on the meta device, as keyword arguments.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from .peers import installed


def available(models, left_out=None):
    """Those of a mapping from name to (library, factory) whose library is installed."""
    return {name: factory for name, (library, factory) in models.items() if installed(library, left_out)}


def load_torchvision():
    """Import torchvision, which transformers, timm and diffusers import too where it is installed.

    A build of it for CUDA cannot load its operators beside torch for the CPU: the two that it looks for when it is
    imported are declared then, and cannot be called.
    """
    if not installed("torchvision"):
        return
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        load_torchvision.declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            load_torchvision.declared.define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        import torchvision  # noqa: F401


def tokens(batch, length):
    """Token ids; on the meta device they have no values."""
    return torch.zeros(batch, length, dtype=torch.long)


def gpt2_medium():
    """GPT-2 medium; the mask is given, because one cannot be made of values that are not there."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False))
    mask = torch.ones(8, 1, 1024, 1024, dtype=torch.bool)
    return model, {"input_ids": tokens(8, 1024), "attention_mask": mask}


def t5_base():
    """T5 base: encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768, d_ff=3072, num_layers=12, num_decoder_layers=12, num_heads=12, use_cache=False
    )
    return T5ForConditionalGeneration(config), {
        "input_ids": tokens(16, 512),
        "decoder_input_ids": tokens(16, 128),
    }


def clip_l14():
    """CLIP ViT-L/14: a tower for text and one for images."""
    from transformers import CLIPConfig, CLIPModel

    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
    }
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=768))
    return model, {"input_ids": tokens(64, 77), "pixel_values": torch.zeros(64, 3, 224, 224)}


def inception_v3():
    """Inception v3, with its auxiliary output."""
    from torchvision import models

    return models.inception_v3(weights=None, init_weights=False), {"x": torch.zeros(32, 3, 299, 299)}


def densenet201():
    """DenseNet-201."""
    from torchvision import models

    return models.densenet201(), {"x": torch.zeros(32, 3, 224, 224)}


def stable_diffusion():
    """The U-Net of Stable Diffusion 1.5."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    inputs = {"sample": torch.zeros(8, 4, 64, 64), "timestep": torch.zeros(8, dtype=torch.long)}
    return model, {**inputs, "encoder_hidden_states": torch.zeros(8, 77, 768)}


class UNet(nn.Module):
    """A plain U-Net (Ronneberger et al., 2015) with batch norm."""

    def __init__(self, widths=(64, 128, 256, 512, 1024)):
        super().__init__()
        self.down = nn.ModuleList([self.block(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True)])
        pairs = list(zip(reversed(widths[1:]), reversed(widths[:-1]), strict=True))
        self.widen = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs])
        self.up = nn.ModuleList([self.block(2 * b, b) for _, b in pairs])
        self.last = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def block(a, b):
        """Two convolutions."""
        return nn.Sequential(
            *(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()),
            *(nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()),
        )

    def forward(self, x):
        """Down with each result kept, and up again."""
        kept = []
        for i, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for widen, block, skip in zip(self.widen, self.up, reversed(kept[:-1]), strict=True):
            x = block(torch.cat([skip, widen(x)], 1))
        return self.last(x)


class Towers(nn.Module):
    """Two stacks of residual blocks of unlike widths that meet at the end."""

    def __init__(self, widths=(1024, 1536), depths=(16, 12)):
        super().__init__()
        self.first, self.second = (
            nn.ModuleList([self.block(w) for _ in range(d)]) for w, d in zip(widths, depths, strict=True)
        )
        self.heads = nn.ModuleList([nn.Linear(w, 256) for w in widths])

    @staticmethod
    def block(width):
        """What a transformer has after its attention."""
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, y):
        """Similarities of the rows of x and y."""
        for block in self.first:
            x = x + block(x)
        for block in self.second:
            y = y + block(y)
        return self.heads[0](x.mean(1)) @ self.heads[1](y.mean(1)).T


def towers():
    """Two synthetic towers."""
    return Towers(), {"x": torch.zeros(32, 256, 1024), "y": torch.zeros(32, 256, 1536)}


LARGE = {
    "gpt2-medium": ("transformers", gpt2_medium),
    "t5-base": ("transformers", t5_base),
    "clip-l14": ("transformers", clip_l14),
    "inception-v3": ("torchvision", inception_v3),
    "densenet201": ("torchvision", densenet201),
    "unet": ("torch", lambda: (UNet(), {"x": torch.zeros(8, 3, 256, 256)})),
    "sd15-unet": ("diffusers", stable_diffusion),
}
TOWERS = {"clip-l14": LARGE["clip-l14"], "t5-base": LARGE["t5-base"], "towers": ("torch", towers)}


# Tiny, and with values: a factory returns the model, and a function from the size of a batch to (args, kwargs).


def _images(size):
    return lambda batch: ((torch.randn(batch, 3, size, size),), {})


def _texts(batch):
    ids = torch.randint(3, 90, (batch, 12))
    return (), {"input_ids": ids, "attention_mask": torch.ones(batch, 12, dtype=torch.long)}


def _translations(batch):
    args, kwargs = _texts(batch)
    return args, {**kwargs, "decoder_input_ids": torch.randint(3, 90, (batch, 8))}


def _torchvision(name, size, **options):
    def make():
        from torchvision import models

        return getattr(models, name)(**options), _images(size)

    return "torchvision", make


def _timm(name, size, **options):
    def make():
        import timm

        return timm.create_model(name, pretrained=False, num_classes=10, **options), _images(size)

    return "timm", make


def _transformers(name, inputs=_texts, **sizes):
    def make():
        import transformers

        model = getattr(transformers, name)
        transformers.logging.set_verbosity_error()
        return model(model.config_class(vocab_size=99, **sizes)), inputs

    return "transformers", make


def _small_diffusion():
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    blocks |= {"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "block_out_channels": (32, 64)}
    model = UNet2DModel(sample_size=16, layers_per_block=1, **blocks)

    def inputs(batch):
        return (torch.randn(batch, 3, 16, 16), torch.full((batch,), 7)), {"return_dict": False}

    return model, inputs


SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
TINY = {
    "resnet18": _torchvision("resnet18", 32),
    "mobilenet_v3_small": _torchvision("mobilenet_v3_small", 32),
    "googlenet": _torchvision("googlenet", 64, aux_logits=True, init_weights=False),
    "vit_tiny": _timm("vit_tiny_patch16_224", 64, img_size=64, depth=3),
    "convnext_atto": _timm("convnext_atto", 32),
    "gpt2": _transformers("GPT2LMHeadModel", n_embd=32, n_layer=3, n_head=4, use_cache=False),
    "llama": _transformers("LlamaForCausalLM", num_key_value_heads=2, use_cache=False, **SIZES),
    "mixtral": _transformers(
        "MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4, use_cache=False, **SIZES
    ),
    "bert": _transformers("BertForMaskedLM", **SIZES),
    "t5": _transformers(
        "T5ForConditionalGeneration",
        _translations,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        use_cache=False,
    ),
    "unet2d": ("diffusers", _small_diffusion),
}
