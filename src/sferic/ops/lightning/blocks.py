"""Lightning attention by blocks (the paper's Algorithm 1) in plain PyTorch: linear memory.

The sequence is cut into blocks of C tokens at fixed places, whatever the documents in it.  With
r the position inside a block, a token gets

    inside its block    (Q K^T * D) V,  D[r, c] = exp(-s (r - c)) for r >= c and one document
    from before it      exp(-s (r + 1)) q_r S_in, if its document began before the block

S_in of all blocks comes from the blocks' own sums U = sum_r exp(-s (C - 1 - r)) k_r v_r^T by one
matrix product with powers of exp(-s C); so no Python loop runs over blocks, only over groups of
`GROUP` of them.  Every exponent is <= 0, so no slope overflows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sferic.ops.matmul import on_host
from sferic.ops.precision import at_least_float32

BLOCK = 64
GROUP = 64


def lightning_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    initial_state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Block form of lightning attention.

    Args:
        q, k: [B, T, H, K], T >= 1.
        v: [B, T, H, V].
        slopes: [H].
        initial_state: [B, H, K, V]: the state before the first token (of the first document).
        documents: [T], non-decreasing document numbers shared by the batch; None for one document.

    Returns:
        o [B, T, H, V] in the dtype of v, and the state after the last token (of the last
        document), [B, H, K, V], at least float32.
    """
    B, T, H, _ = q.shape
    V = v.shape[-1]
    C = min(BLOCK, T)
    N = -(-T // C)
    q_, k_, v_ = at_least_float32(q, k, v)
    s = slopes.to(q_.dtype)[:, None]  # [H, 1]

    def blocks(x: Tensor) -> Tensor:  # [B, T, H, d] -> [B, H, N, C, d]
        return F.pad(x.transpose(1, 2), (0, 0, 0, N * C - T)).reshape(B, H, N, C, x.shape[-1])

    q_, k_, v_ = blocks(q_), blocks(k_), blocks(v_)
    r = torch.arange(C, device=q.device)
    tokens = (T - C * torch.arange(N, device=q.device)).clamp(max=C)  # of each block, [N]
    after = (tokens[:, None] - 1 - r).clamp(min=0)  # tokens of its block after token r, [N, C]

    inside = torch.exp(-s[..., None] * (r[:, None] - r).clamp(min=0)).tril()[:, None]  # [H,1,C,C]
    from_start = torch.exp(-s * (r + 1))[:, None]  # [H, 1, C]
    to_end = torch.exp(-s[..., None] * after)  # [H, N, C]
    carried = None
    if documents is not None:
        doc = F.pad(documents, (0, N * C - T), value=-1).reshape(N, C)
        last = doc.gather(1, tokens[:, None] - 1)
        carried = torch.cat([doc[:1, :1], last])  # document of the state around blocks, [N + 1, 1]
        if not (on_host(doc) and bool((doc == doc[:, :1]).all())):  # a block holds several
            inside = inside * (doc[:, :, None] == doc[:, None, :])
        from_start = from_start * (doc == carried[:-1])
        to_end = to_end * (doc == last)

    own = (k_ * to_end[..., None]).transpose(-1, -2) @ v_  # [B, H, N, K, V]
    before, final = _scan(own, s, tokens, carried, initial_state)
    o = (q_ @ k_.transpose(-1, -2)).mul_(inside) @ v_
    o += (q_ * from_start[..., None]) @ before
    return o.reshape(B, H, N * C, V)[:, :, :T].transpose(1, 2).to(v.dtype), final


def _scan(
    own: Tensor, s: Tensor, tokens: Tensor, carried: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """States around blocks from the blocks' own sums.

    Args:
        own: [B, H, N, K, V].
        s: slopes [H, 1].
        tokens: [N], tokens of each block.
        carried: [N + 1, 1], document of the state before the first and after each block; a state
            reaches no other document.
        initial_state: [B, H, K, V] or None.

    Returns:
        States before each block [B, H, N, K, V] and after the last one [B, H, K, V].
    """
    B, H, N, K, V = own.shape
    own = own.flatten(-2)
    state = own.new_zeros(B, H, K * V) if initial_state is None else initial_state.flatten(-2)
    state = state.to(own.dtype)[:, :, None]
    before = []
    for a in range(0, N, GROUP):
        b = min(a + GROUP, N)
        passed = F.pad(tokens[a:b].cumsum(0), (1, 0))  # tokens since the group's start, [b-a+1]
        distance = (passed[:, None] - passed).clamp(min=0)
        power = torch.exp(-s[..., None] * distance).tril()  # [H, b-a+1, b-a+1]
        if carried is not None:
            power = power * (carried[a : b + 1] == carried[a : b + 1, 0])
        states = power @ torch.cat([state, own[:, :, a:b]], dim=2)
        before.append(states[:, :, :-1])
        state = states[:, :, -1:]
    return torch.cat(before, dim=2).unflatten(-1, (K, V)), state.reshape(B, H, K, V)
