"""Files written in one step, and JSON read with a clear error."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from pathlib import Path

__all__ = ["RecordError", "read_json", "write_bytes_atomic", "write_text_atomic"]


class RecordError(ValueError):
    """A file that cannot be read, written or trusted; the message names the file.

    Example:
        >>> import tempfile, ackpt
        >>> from ackpt.core.files import write_text_atomic
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         write_text_atomic(folder, "text")
        ...     except ackpt.RecordError:
        ...         print("a folder is no file")
        a folder is no file
    """


def write_text_atomic(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text file in one step, UTF-8 with ``\\n``: readers see the old file or the new one, never a part.

    Folders on the way are made. Raises RecordError where the file cannot be written.

    Example:
        >>> import tempfile
        >>> from ackpt.core.files import write_text_atomic
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_text_atomic(f"{folder}/tables/peaks.md", "| layers |").read_text()
        '| layers |'
    """
    return write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a file in one step, as `write_text_atomic` does.

    Example:
        >>> import tempfile
        >>> from ackpt.core.files import write_bytes_atomic
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_bytes_atomic(f"{folder}/numbers.bin", bytes([1, 2])).stat().st_size
        2
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if path.is_dir():
            raise RecordError(f"{path} is a folder: name a file in it") from error
        reason = error.strerror or error
        raise RecordError(f"cannot write {path}: {reason}; name a folder that can be written") from error
    return path


def read_json(path, kind: str, error_type: type[Exception]):
    """The data in a file that `save` of a ``"plan"`` or ``"profile"`` wrote; `error_type` if it is no JSON."""
    try:
        return json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise error_type(
            f"{path} is not a {kind}: {error}. It may be truncated; {kind} again and save it with "
            f"{kind.capitalize()}.save"
        ) from error
