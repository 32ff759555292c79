"""The fixed decay of each head (spec of the released model; ALiBi's rule for other head counts)."""

import math


def lightning_slopes(num_heads: int, layer: int, depth: int) -> list[float]:
    """Slopes of one layer: 2^(-8h/H) for h = 1..H, times 1 - layer/(depth - 1) + 1e-5.

    Head counts that are not powers of two take the slopes of the power below, then every other
    slope of the power above, as ALiBi does.  `layer` is absolute, so a slice of a deeper model
    has the full model's slopes.  A model of one layer has the factor 1 + 1e-5.
    """
    factor = 1 - layer / max(depth - 1, 1) + 1e-5
    return [slope * factor for slope in _alibi(num_heads)]


def _alibi(num_heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    if power < num_heads:
        slopes += _alibi(2 * power)[0::2][: num_heads - power]
    return slopes
