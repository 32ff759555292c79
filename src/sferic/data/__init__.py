"""Text to training rows: sources, tokenizer, token store, packing, stream. No torch here.

    read_corpus -> split -> Tokenizer, tokenize -> write_store -> PackStream -> Pack

Legend: T tokens of a pack, S sequences in a pack (its pieces and the pad document).
"""

from sferic.data.packing import Pack, Plan, make_pack, plan
from sferic.data.sources import Document, read_corpus, split
from sferic.data.store import StoreError, StoreMeta, TokenStore, write_store
from sferic.data.stream import PackStream, heldout_packs
from sferic.data.tokenizer import IncrementalDecoder, Tokenizer, tokenize

__all__ = [
    "Document",
    "IncrementalDecoder",
    "Pack",
    "PackStream",
    "Plan",
    "StoreError",
    "StoreMeta",
    "TokenStore",
    "Tokenizer",
    "heldout_packs",
    "make_pack",
    "plan",
    "read_corpus",
    "split",
    "tokenize",
    "write_store",
]
