"""Files that survive: tensors and a plain header in the safetensors format, written whole or not at all.

Every tensor and the header carry a SHA-256, so a damaged file is refused with the name of what is wrong.
Nothing is ever unpickled or imported, so a hostile file can at worst be refused.
"""

import contextlib
import glob
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

VERSION = 1
ABANDONED = 3600  # seconds without a change after which nobody writes a file any more
TRIES = 20  # to read a file that is being replaced
Content = TypeVar("Content")
Stamp = tuple[int, int, int]


class FileError(ValueError):
    """A file is damaged, hostile, of another kind or from a newer version."""


def write(path: str | Path, kind: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file of a kind in one step."""
    plain = _apart({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    digests = {name: digest({name: value}) for name, value in plain.items()}
    text = json.dumps({**header, "digests": digests}, sort_keys=True, allow_nan=False)
    metadata = {"format": f"cps {kind}", "version": str(VERSION), "header": text, "digest": _sha(text)}
    with atomic_write(path) as partial:
        save_file(plain, partial, metadata)
        with partial.open("r+b") as file:
            _put_in_order(file)


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Give a file beside `path` to write, sync it to the disk, then put it in place of `path` in one step.

    An error leaves what was there before. Each writer has a file of its own, so that of several the last one wins,
    whole.
    """
    path = Path(path).resolve()  # what a link points to is replaced, not the link
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with folder_of(path):
        partial.touch()
    try:
        mode = (path if path.exists() else partial).stat().st_mode
        yield partial
        with partial.open("r+b") as file:
            os.fsync(file.fileno())
        partial.chmod(mode)  # safetensors writes files that only their owner may read
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise OSError(f"could not write '{path}' ({error}); what was there before is untouched") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    _sync_folder(path.parent)
    remove_temporary(path)


@contextlib.contextmanager
def folder_of(path: Path) -> Iterator[None]:
    """Make the folder of a file; an error of writing there names the folder, not the hidden file that was tried."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise type(error)(f"cannot write in '{path.parent}' ({error.strerror})") from None


def remove(path: Path, *, older: float = ABANDONED) -> None:
    """Remove a file, if it is there, and what killed programs have left of it."""
    path.unlink(missing_ok=True)
    remove_temporary(path, older=older)


def remove_temporary(path: Path, *, older: float = ABANDONED) -> None:
    """Remove what programs that were killed while they wrote the file have left beside it, so many seconds ago."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime >= older:
                partial.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step: it holds the old text or the new, never a part."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file in one step."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a file, each checked against its digest."""
    return _steadily(_read, Path(path), kind)


def read_header(path: str | Path, kind: str) -> dict[str, Any]:
    """Return the header of a file, checked against its digest, without reading the tensors."""
    return _steadily(_read_header, Path(path), kind)


def _steadily(read: Callable[[Path, str], Content], path: Path, kind: str) -> Content:
    """Read a file; if another has taken its place meanwhile, of which one would see parts of both, read that one."""
    for _ in range(TRIES):
        check_file(path)
        stamp = stamp_of(path)
        try:
            return read(path, kind)
        except FileError:
            if stamp_of(path) == stamp:
                raise
    raise FileError(f"'{path}' is replaced faster than it can be read")


def _read(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with _opened(path, kind) as file:
        header = _checked_header(path, kind, file.metadata() or {})
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    digests = header.pop("digests", None)
    if not isinstance(digests, dict) or set(digests) != set(tensors):
        raise FileError(f"'{path}' is damaged: its list of tensors does not match its tensors")
    for name, value in tensors.items():
        if digest({name: value}) != digests[name]:
            raise FileError(f"'{path}' is damaged: tensor '{name}' is not what was written")
    return header, tensors


def _read_header(path: Path, kind: str) -> dict[str, Any]:
    with _opened(path, kind) as file:
        return _checked_header(path, kind, file.metadata() or {})


def stamp_of(path: Path) -> Stamp | None:
    """Return what tells one version of a file from another without reading it; None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def check_file(path: str | Path) -> None:
    """Refuse what is no file."""
    if not Path(path).is_file():
        is_folder = Path(path).is_dir()
        raise FileNotFoundError(f"'{path}' is a folder, not a file" if is_folder else f"there is no file '{path}'")


@contextlib.contextmanager
def _opened(path: Path, kind: str) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, RuntimeError, OverflowError, UnicodeDecodeError) as error:
        raise FileError(f"'{path}' is not a readable cps {kind} file, or is damaged: {error}") from None


def digest(tensors: Mapping[str, Tensor], extra: str = "") -> str:
    """Return the SHA-256 of named tensors: names, types, shapes and every bit of the values."""
    sha = hashlib.sha256(extra.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        sha.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _checked_header(path: Path, kind: str, metadata: dict[str, str]) -> dict[str, Any]:
    if metadata.get("format") != f"cps {kind}":
        raise FileError(f"'{path}' is not a cps {kind} file (its format is {metadata.get('format')!r})")
    version = metadata.get("version", "")
    if version != str(VERSION):
        hint = "update cps to read it" if version.isdecimal() and int(version) > VERSION else "it is damaged"
        raise FileError(f"'{path}' has format version {version!r}, this cps reads {VERSION}: {hint}")
    text = metadata.get("header", "")
    if _sha(text) != metadata.get("digest"):
        raise FileError(f"'{path}' is damaged: its header is not what was written")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"'{path}' has a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FileError(f"'{path}' has a header that is not an object")
    return header


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with those copied that lie in the same memory, which safetensors refuses."""
    seen: set[int] = set()
    apart = {}
    for name, value in tensors.items():
        place = value.untyped_storage().data_ptr()
        apart[name] = value.clone() if place in seen else value
        seen.add(place)
    return apart


def _put_in_order(file: BinaryIO) -> None:
    """Sort the metadata of a safetensors file, which it writes in any order, so that equal models are equal files."""
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    content = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    if len(content) == size:
        file.seek(8)
        file.write(content)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
