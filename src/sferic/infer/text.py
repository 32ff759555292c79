"""Text in, text out."""

from collections.abc import Iterator

from sferic.data import IncrementalDecoder, Tokenizer
from sferic.infer.generate import GREEDY, generate_stream
from sferic.infer.sampler import Sampling
from sferic.nn import HybridModel


def continue_text(
    model: HybridModel,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling = GREEDY,
    *,
    max_new_tokens: int,
) -> Iterator[str]:
    """Yield a prompt and its continuation in pieces of whole characters, to the document's end.

    An empty prompt begins a document.  Other arguments are those of `generate_stream`.
    """
    decoder = IncrementalDecoder(tokenizer)
    start = tokenizer.end_id if tokenizer.bos_id is None else tokenizer.bos_id
    for (token,) in generate_stream(
        model,
        [tokenizer.encode(prompt) or [start]],
        sampling,
        max_new_tokens=max_new_tokens,
        stop_ids=tokenizer.stop_ids,
        vocab_size=tokenizer.vocab_size,
    ):
        assert token is not None
        yield prompt + decoder.push(token)
        prompt = ""
    yield decoder.flush()
