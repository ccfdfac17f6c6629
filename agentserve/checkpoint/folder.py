"""Where a checkpoint may be written: never over what is none."""

from __future__ import annotations

from pathlib import Path


class CheckpointFolderError(OSError):
    """A folder that cannot take a checkpoint. The message says what to do."""


class CheckpointExistsError(CheckpointFolderError):
    """The folder already holds something; pass ``overwrite`` to replace a checkpoint."""


def make_folder(folder: Path, *, overwrite: bool) -> None:
    """Make ``folder``, or see that it may be written to.

    Args:
        overwrite: it may hold a checkpoint, whole or half written, but nothing else.

    Raises:
        CheckpointExistsError: it is not empty and ``overwrite`` is not set.
        CheckpointFolderError: it holds something that is no checkpoint, is a file, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        raise CheckpointFolderError(
            f"{folder} cannot be made ({error.strerror or error}); name a folder that can be written"
        ) from None
    if names and not overwrite:
        raise CheckpointExistsError(f"{folder} is not empty; pass --overwrite to replace it or name another folder")
    if names and not any(name == "config.json" or name.endswith(".safetensors") for name in names):
        raise CheckpointFolderError(f"{folder} holds files that are no checkpoint; name another folder")
