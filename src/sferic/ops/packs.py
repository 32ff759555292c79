"""What every operator on packs expects of its offsets."""

from torch import Tensor


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> None:
    """Offsets must rise (or stay, for empty documents) from 0 to the number of tokens.

    Raises:
        ValueError: they don't, or are not integers.  On a GPU only the shape is checked, since
            looking at the values would wait for it.
    """
    good = cu_seqlens.dim() == 1 and cu_seqlens.numel() > 0 and not cu_seqlens.is_floating_point()
    if good and cu_seqlens.device.type == "cpu":
        good = (
            int(cu_seqlens[0]) == 0
            and int(cu_seqlens[-1]) == tokens
            and bool((cu_seqlens.diff() >= 0).all())
        )
    if not good:
        raise ValueError(
            f"cu_seqlens {cu_seqlens.tolist()} must rise from 0 to the number of tokens, {tokens}, "
            "in one row of integers"
        )
