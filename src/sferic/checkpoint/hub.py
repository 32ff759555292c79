"""Folders of the Hugging Face hub, by `owner/name` or `owner/name@revision`."""

import re
from pathlib import Path

_ID = re.compile(r"(?P<owner>\w[\w.-]*)/(?P<name>\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
# no code and no pickles
_WEIGHTS, _OTHERS = ["*.safetensors"], ["*.json", "*.jinja", "merges.txt"]


def local_folder(path: str | Path, *, weights: bool = True) -> Path:
    """The folder itself, or where a hub repository's files have been downloaded to.

    Args:
        path: a folder, or a hub id.  What begins like a local path, in a folder that is there, is
            one: a mistyped path asks no hub.
        weights: False leaves the weights out.

    Raises:
        ValueError: a hub id whose repository can't be had.
    """
    folder = Path(path)
    match = _ID.fullmatch(path) if isinstance(path, str) else None
    if folder.exists() or match is None or Path(match["owner"]).exists():
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
                f"{match['owner']}/{match['name']}",
                revision=match["revision"],
                allow_patterns=[*_WEIGHTS, *_OTHERS] if weights else _OTHERS,
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} is no folder here, and the Hugging Face hub does not give it ({reason})"
        ) from error
