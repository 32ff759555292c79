"""AdamW as the paper trains: decay on matrices only."""

import torch
from torch import nn

from sferic.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Two groups: weights of two or more dims decay, norms don't.  The lr is set at each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=True)
