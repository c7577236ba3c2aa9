"""Files of tensors and a JSON header in the safetensors format, with a SHA-256 of each tensor and of the header.

A damaged file raises `FileError` with the name of the damaged part. Reading unpickles nothing and imports nothing, so
a hostile file can do no more than raise.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cps.storage.atomic import atomic_write, file_version

VERSION = 1
MAX_READS = 20  # of a file that is replaced while it is read

Content = TypeVar("Content")


class FileError(ValueError):
    """A file is damaged, hostile, of another kind or from a newer version."""


def write(path: str | Path, kind: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file of this kind atomically."""
    plain = _copy_shared({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    digests = {name: digest({name: value}) for name, value in plain.items()}
    text = json.dumps({**header, "digests": digests}, sort_keys=True, allow_nan=False)
    metadata = {"format": f"cps {kind}", "version": str(VERSION), "header": text, "digest": _sha(text)}
    with atomic_write(path) as temporary:
        save_file(plain, temporary, metadata)
        with temporary.open("r+b") as file:
            _sort_metadata(file)


def read(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a file, each checked against its digest."""
    return _read_unchanged(_read, Path(path), kind)


def read_header(path: str | Path, kind: str) -> dict[str, Any]:
    """Return the header of a file, checked against its digest, without reading the tensors."""
    return _read_unchanged(_read_header, Path(path), kind)


def digest(tensors: Mapping[str, Tensor], extra: str = "") -> str:
    """Return the SHA-256 of named tensors: names, types, shapes and every bit of the values."""
    sha = hashlib.sha256(extra.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        sha.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def check_file(path: str | Path) -> None:
    """Raise `FileNotFoundError` if the path is not a file."""
    if not Path(path).is_file():
        is_folder = Path(path).is_dir()
        raise FileNotFoundError(f"'{path}' is a folder, not a file" if is_folder else f"there is no file '{path}'")


def _read_unchanged(read: Callable[[Path, str], Content], path: Path, kind: str) -> Content:
    """Read a file; read it again if it was replaced meanwhile, since parts of both would look like damage."""
    for _ in range(MAX_READS):
        check_file(path)
        version = file_version(path)
        try:
            return read(path, kind)
        except FileError:
            if file_version(path) == version:
                raise
    raise FileError(f"'{path}' is replaced faster than it can be read")


def _read(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with _open(path, kind) as file:
        header = _parse_header(path, kind, file.metadata() or {})
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    digests = header.pop("digests", None)
    if not isinstance(digests, dict) or set(digests) != set(tensors):
        raise FileError(f"'{path}' is damaged: its list of tensors does not match its tensors")
    for name, value in tensors.items():
        if digest({name: value}) != digests[name]:
            raise FileError(f"'{path}' is damaged: tensor '{name}' does not match its digest")
    return header, tensors


def _read_header(path: Path, kind: str) -> dict[str, Any]:
    with _open(path, kind) as file:
        return _parse_header(path, kind, file.metadata() or {})


@contextmanager
def _open(path: Path, kind: str) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, RuntimeError, OverflowError, UnicodeDecodeError) as error:
        raise FileError(f"'{path}' is not a readable cps {kind} file, or is damaged: {error}") from None


def _parse_header(path: Path, kind: str, metadata: dict[str, str]) -> dict[str, Any]:
    """Return the header in the metadata of a file; raise `FileError` if it is not a header that `write` wrote."""
    if metadata.get("format") != f"cps {kind}":
        raise FileError(f"'{path}' is not a cps {kind} file (its format is {metadata.get('format')!r})")
    version = metadata.get("version", "")
    if version != str(VERSION):
        hint = "update cps to read it" if version.isdecimal() and int(version) > VERSION else "it is damaged"
        raise FileError(f"'{path}' has format version {version!r}, this cps reads {VERSION}: {hint}")
    text = metadata.get("header", "")
    if _sha(text) != metadata.get("digest"):
        raise FileError(f"'{path}' is damaged: its header does not match its digest")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"'{path}' has a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FileError(f"'{path}' has a header that is not an object")
    return header


def _copy_shared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with copies of those that share memory with an earlier one: safetensors rejects them."""
    seen: set[int] = set()
    separate = {}
    for name, value in tensors.items():
        address = value.untyped_storage().data_ptr()
        separate[name] = value.clone() if address in seen else value
        seen.add(address)
    return separate


def _sort_metadata(file: BinaryIO) -> None:
    """Sort the metadata, which safetensors writes in random order, so that equal models are equal files."""
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    content = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    if len(content) == size:
        file.seek(8)
        file.write(content)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
