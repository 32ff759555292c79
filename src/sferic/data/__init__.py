"""Text to training rows: sources, tokenizer, chats, token store, packing, stream. No torch here.

    read_corpus -> split -> Tokenizer, tokenize -> write_store -> PackStream -> Pack

Legend: T tokens of a pack, S sequences in a pack (its pieces and the pad document).
"""

from sferic.data.chat import (
    M1,
    TEXT_01,
    ChatTemplate,
    Rendered,
    Reply,
    ToolCall,
    format_calls,
    parse_reply,
)
from sferic.data.packing import Pack, Plan, make_pack, plan
from sferic.data.sources import Document, read_corpus, split
from sferic.data.store import StoreError, StoreMeta, TokenStore, write_store
from sferic.data.stream import PackStream, heldout_packs
from sferic.data.tokenizer import ChatTokens, IncrementalDecoder, Tokenizer, tokenize
from sferic.data.tokenizer_files import TOKENIZER_FILES, copy_tokenizer

__all__ = [
    "M1",
    "TEXT_01",
    "TOKENIZER_FILES",
    "ChatTemplate",
    "ChatTokens",
    "Document",
    "IncrementalDecoder",
    "Pack",
    "PackStream",
    "Plan",
    "Rendered",
    "Reply",
    "StoreError",
    "StoreMeta",
    "TokenStore",
    "Tokenizer",
    "ToolCall",
    "copy_tokenizer",
    "format_calls",
    "heldout_packs",
    "make_pack",
    "parse_reply",
    "plan",
    "read_corpus",
    "split",
    "tokenize",
    "write_store",
]
