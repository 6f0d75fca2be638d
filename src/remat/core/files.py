"""Versioned JSON files: read with typed access and errors that name the place, written atomically.

A reader of a file sees the old version or the new one, never a part.
"""

from __future__ import annotations

import gzip
import json
import os
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from remat.core.errors import InvalidFile

_GZIP_MAGIC = b"\x1f\x8b"
_MISSING = object()


class JsonReader:
    """Typed access to one JSON object; every error names the file and the place in it.

    Each accessor takes a key and perhaps a default for a missing one, and raises ``InvalidFile`` where the key is
    required and missing, or holds a value of another type. A bool is never taken for a number.
    """

    def __init__(self, source: str, data: object, where: str = "the file") -> None:
        self.source = source
        self._where = where
        if not isinstance(data, dict):
            self.fail(f"{where} is {_shown(data)}, not a JSON object")
        self._data: Mapping[str, Any] = data

    def fail(self, problem: str) -> NoReturn:
        """Raise ``InvalidFile`` with the file's name."""
        raise InvalidFile(f"{self.source}: {problem}")

    def check_format(self, wanted: str, newest: int) -> None:
        """Raise unless the object is of the format ``wanted``, in a version from 1 to ``newest``."""
        found = self._data.get("format")
        if found != wanted:
            self.fail(f'this is no {wanted} file: its "format" is {_shown(found)}')
        version = self.integer("version")
        if version > newest:
            self.fail(
                f"{wanted} version {version} was written by a newer remat; upgrade (this one reads up to {newest})"
            )
        if version < 1:
            self.fail(f"there is no {wanted} version {version}; versions start at 1")

    def integer(self, key: str, default: object = _MISSING) -> int:
        """An integer."""
        value = self._get(key, default)
        if not _is_int(value):
            self._wrong(key, value, "an integer")
        return int(value)

    def number(self, key: str, default: object = _MISSING) -> float:
        """A finite or infinite number, as a float."""
        value = self._get(key, default)
        if not _is_int(value) and not isinstance(value, float):
            self._wrong(key, value, "a number")
        try:
            return float(value)
        except OverflowError:
            self._wrong(key, value, "a number of this size")

    def text(self, key: str, default: object = _MISSING) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self._wrong(key, value, "a text")
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; none where the key is missing."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._wrong(key, value, "a list of texts")
        return tuple(value)

    def flag(self, key: str, default: object = _MISSING) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self._wrong(key, value, "true or false")
        return bool(value)

    def integers(self, key: str, default: object = _MISSING) -> tuple[int, ...]:
        """A list of integers."""
        value = self._get(key, default)
        if not isinstance(value, list) or not all(_is_int(item) for item in value):
            self._wrong(key, value, "a list of integers")
        return tuple(value)

    def pairs(self, key: str) -> tuple[tuple[int, int], ...]:
        """A list of pairs of integers; none where the key is missing."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(_is_int(item) for item in pair) for pair in value
        ):
            self._wrong(key, value, "a list of pairs of integers")
        return tuple((pair[0], pair[1]) for pair in value)

    def numbers_by_name(self, key: str) -> dict[str, float]:
        """An object whose values are all numbers."""
        reader = self.nested(key)
        return {name: reader.number(name) for name in reader._data}

    def nested(self, key: str) -> JsonReader:
        """A reader for a required object."""
        return JsonReader(self.source, self._get(key, _MISSING), f"{key!r} of {self._where}")

    def objects(self, key: str, each: str) -> list[JsonReader]:
        """A reader for each object of a required list; ``each`` names one in messages."""
        value = self._get(key, _MISSING)
        if not isinstance(value, list):
            self._wrong(key, value, "a list")
        return [JsonReader(self.source, item, f"{each} {number}") for number, item in enumerate(value)]

    def has(self, key: str) -> bool:
        """Whether the key is there with something in it; null means absent."""
        return self._data.get(key) is not None

    def _get(self, key: str, default: object) -> Any:
        value = self._data.get(key, default)
        if value is _MISSING:
            self.fail(f"{self._where} has no {key!r}")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> NoReturn:
        self.fail(f"{key!r} of {self._where} is {_shown(value)}, not {wanted}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_json(path: str | Path) -> object:
    """Decode a JSON file, gzipped or not.

    Raises:
        InvalidFile: if it is truncated or no JSON.
        FileNotFoundError: if there is no such file.
    """
    data = Path(path).read_bytes()
    try:
        if data.startswith(_GZIP_MAGIC) or str(path).endswith(".gz"):
            data = gzip.decompress(data)
        return json.loads(data, parse_constant=_refuse_constant)
    except EOFError:
        raise InvalidFile(f"{path}: the gzip file is truncated; write or fetch it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InvalidFile(f"{path}: the gzip file is damaged ({error}); write or fetch it again") from None
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"{path}: this is no JSON, or it is truncated ({error}); write or fetch it again") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def write_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; a path ending in ``.gz`` is compressed."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    if str(path).endswith(".gz"):
        data = gzip.compress(data, mtime=0)  # No date in it: equal graphs give equal files.
    write_atomically(path, data)


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the whole new one.

    Raises:
        OSError: if the file cannot be written, naming it; an older file of that name is then untouched.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)  # A pipe or a device, which must not be replaced by a file.
        return
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        draft.write_bytes(data)
        os.replace(draft, target)
    except OSError as error:
        # The draft's name says nothing to a user.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        draft.unlink(missing_ok=True)
