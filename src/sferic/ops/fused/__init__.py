"""Small operators whose parts belong together: norms, and the head with its loss."""

from sferic.ops.fused.cross_entropy import linear_cross_entropy, token_losses
from sferic.ops.fused.norm import gated_rms_norm, rms_norm

__all__ = ["gated_rms_norm", "linear_cross_entropy", "rms_norm", "token_losses"]
