"""Sferic: hybrid lightning-attention MoE models, from kernels to generation.

    sferic.load(path) -> model              sferic.save(model, path)
    sferic.load_tokenizer(path)             sferic.generate(model, tokens, ...)
    sferic.ops.lightning_attention(...)     model(tokens) -> logits
    sferic.Engine(model)                    many requests at once

Names are imported when first used, so that `import sferic` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sferic import ops
    from sferic.checkpoint import load, load_tokenizer, save
    from sferic.infer import Engine, generate

__version__ = "0.1.0"

_PLACES = {
    "load": "sferic.checkpoint",
    "save": "sferic.checkpoint",
    "load_tokenizer": "sferic.checkpoint",
    "generate": "sferic.infer",
    "Engine": "sferic.infer",
}

__all__ = ["Engine", "generate", "load", "load_tokenizer", "ops", "save"]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("sferic.ops")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'sferic' has no attribute {name!r}")
