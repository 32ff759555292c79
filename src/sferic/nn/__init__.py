"""The hybrid model and what it reads and remembers, written as if one device existed.

Legend: B batch, T tokens of a pack, S sequences of a pack, D model width, H query heads, G K/V
heads, K key dim, V value dim, F FFN width, E experts, k experts per token.
"""

from sferic.nn.batch import Batch
from sferic.nn.cache import Cache, ContiguousCache
from sferic.nn.dispatch import Routing
from sferic.nn.model import HybridModel

__all__ = ["Batch", "Cache", "ContiguousCache", "HybridModel", "Routing"]
