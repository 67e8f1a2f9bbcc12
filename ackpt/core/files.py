"""Write all files of the package: in one step, or through a link or device. Read JSON with a clear error."""

import contextlib
import errno
import json
import os
import stat
import tempfile
import uuid
from pathlib import Path

__all__ = ["RecordError", "check_folder", "check_writable", "read_json", "write_bytes_atomic", "write_text_atomic"]


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

    Missing folders are created. An existing file keeps its mode. Links, devices and pipes are written through, never
    replaced. Raises RecordError where the file cannot be written.

    Example:
        >>> import tempfile
        >>> from ackpt.core.files import write_text_atomic
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_text_atomic(f"{folder}/tables/peaks.md", "| layers |").read_text()
        '| layers |'
    """
    return write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str | os.PathLike[str], data: bytes | None) -> Path:
    """Write a file in one step, as `write_text_atomic` does; with None, only check that it can be written.

    Example:
        >>> import tempfile
        >>> from ackpt.core.files import write_bytes_atomic
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_bytes_atomic(f"{folder}/figure.png", b"bytes").read_bytes()
        b'bytes'
    """
    path, before = Path(path), None
    try:
        opened = _opened(path)
        with contextlib.suppress(FileNotFoundError):
            before = os.stat(path if opened is None else opened)
        if before is not None and stat.S_ISDIR(before.st_mode):
            raise IsADirectoryError
        if before is not None and opened is None and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        is_alone = before is None or (stat.S_ISREG(before.st_mode) and before.st_nlink < 2)
        if opened is None and is_alone:
            _replace(Path(os.path.realpath(path)), before, data)  # of a link, which stays
        elif data is not None:
            _write_into(path, opened, data)
    except IsADirectoryError as error:
        raise RecordError(f"{path} is a folder: name a file in it") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) == errno.ENXIO:
            reason = "no process reads from it"
        raise RecordError(f"cannot write {path}: {reason}; name a file that can be written") from error
    return path


def check_writable(path: str | os.PathLike[str]) -> Path:
    """Raise the error of `write_bytes_atomic` now, before any work, if the file cannot be written; return the path."""
    return write_bytes_atomic(path, None)


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Make the folder if need be; raise OSError if no file can be written there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _opened(path: Path) -> int | None:
    """The descriptor that a path such as ``/dev/stdout`` names, which may be that of a regular file."""
    for _ in range(40):
        if os.path.realpath(path.parent) == f"/proc/{os.getpid()}/fd":
            return int(path.name)
        if not path.is_symlink():
            break
        path = path.parent / os.readlink(path)
    return None


def _write_into(path: Path, opened: int | None, data: bytes) -> None:
    """Write to a device, a pipe, a file with several names or an open file, none of which may be replaced."""
    if opened is None:
        opened = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)  # fails for a pipe that no process reads
        os.set_blocking(opened, True)
    else:
        print(end="", flush=True)
        opened = os.dup(opened)
    with open(opened, "wb") as file:
        file.write(data)


def _replace(target: Path, before: os.stat_result | None, data: bytes | None) -> None:
    """Put a new file in the place of `target`, with the owner and the mode from before."""
    if data is None:
        return check_folder(target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".ackpt-{uuid.uuid4().hex}")
    mode = 0o666 if before is None else 0o600
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            if before is not None:
                with contextlib.suppress(PermissionError):
                    os.chown(temporary, before.st_uid, before.st_gid)
                os.chmod(temporary, stat.S_IMODE(before.st_mode))
            file.write(data)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path, kind: str, error_type: type[Exception]):
    """The data in a file that `save` of a ``"plan"`` or ``"profile"`` wrote; `error_type` if it is no JSON."""
    try:
        return json.loads(Path(path).read_text())
    except (IsADirectoryError, PermissionError) as error:
        raise error_type(
            f"{path} cannot be read: {error.strerror}; give the file that {kind.capitalize()}.save wrote"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise error_type(
            f"{path} is not a {kind}: {error}. It may be truncated; {kind} again and save it with "
            f"{kind.capitalize()}.save"
        ) from error
