from itertools import islice

import pytest

from sferic.data import Document, Tokenizer, read_corpus


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    """A slice of the real corpus."""
    return list(islice(read_corpus("stdlib"), 60))


@pytest.fixture(scope="session")
def tokenizer(documents: list[Document]) -> Tokenizer:
    return Tokenizer.train((document.text for document in documents), 1024)
