"""Folders of the Hugging Face hub, by `owner/name` or `owner/name@revision`."""

import re
from pathlib import Path

_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
# weights, configs, tokenizer and template; no code and no pickles
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "merges.txt"]


def local_folder(path: str | Path, *, weights: bool = True) -> Path:
    """The folder itself, or where a hub repository's files have been downloaded to.

    Args:
        path: a folder, or a hub id; a folder of that name wins.
        weights: False leaves the weights out.

    Raises:
        ValueError: neither a folder nor a repository that can be had.
    """
    folder = Path(path)
    match = _ID.fullmatch(path) if isinstance(path, str) else None
    if folder.exists() or match is None:
        return folder
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ValueError(
            f"{path} is no folder here; to load it from the Hugging Face hub: "
            "pip install 'sferic[hub]'"
        ) from error
    try:
        return Path(
            snapshot_download(
                match["repo"],
                revision=match["revision"],
                allow_patterns=_PATTERNS if weights else _PATTERNS[1:],
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} is no folder here, and the Hugging Face hub does not give it ({reason})"
        ) from error
