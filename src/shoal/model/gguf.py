"""Reads GGUF model files (versions 2 and 3, little endian) through a memory map.

Nothing in the file is trusted: every length, count and offset is checked against the file's size
before it is used, so that a damaged file gives a `ModelFileError` and never a crash.

The layout, as the GGUF specification of GGML defines it:

    "GGUF", version u32, tensor count u64, metadata count u64
    metadata: key, value type u32, value
    tensors: name, number of dimensions u32, dimensions u64 (innermost first), type u32, offset u64
    padding to the alignment, then the data; offsets count from here
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from shoal.model.errors import ModelFileError
from shoal.model.quantization import FORMATS, num_bytes
from shoal.model.weights import WeightTensor, WeightType

Scalar = bool | int | float | str
MetadataValue = Scalar | list["MetadataValue"]

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMENSIONS: Final = 4
MAX_KEY_BYTES: Final = 65535
_MAX_ARRAY_DEPTH: Final = 4
_SUPPORTED_VERSIONS: Final = (2, 3)

# Smallest entries: they bound a count before anything is read.
_MIN_METADATA_BYTES: Final = 8 + 1 + 4 + 1  # key length, key, type, value
_MIN_TENSOR_BYTES: Final = 8 + 1 + 4 + 4 + 8  # name length, name, dimensions, type, offset

_SCALAR_FORMATS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING: Final = 8
_ARRAY: Final = 9

_UINT32: Final = struct.Struct("<I")
_UINT64: Final = struct.Struct("<Q")

# All storage types of GGML, to name the unsupported ones.
_TYPE_NAMES: Final = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"},
    **{22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """A GGUF file, mapped into memory for as long as one of its tensors is referenced.

    `metadata` maps keys to Python values in the order of the file; arrays are lists. `tensors`
    maps names to weights whose data are read-only views of the map. A tensor may be empty
    (a dimension is 0); whoever needs it checks its shape.
    """

    path: Path
    version: int
    alignment: int
    metadata: dict[str, MetadataValue]
    tensors: dict[str, WeightTensor]

    @staticmethod
    def open(path: str | os.PathLike[str]) -> GGUFFile:
        """Map the file at `path` and read all but the data of its tensors.

        Raises:
            ModelFileError: the file can't be read, isn't GGUF, is damaged or isn't supported.
        """
        path = Path(path)
        buffer = _map(path)
        reader = _Reader(path, buffer)
        version = reader.read_version()
        tensor_count, metadata_count = reader.uint64(), reader.uint64()
        reader.check_count("metadata entries", metadata_count, _MIN_METADATA_BYTES)
        reader.check_count("tensors", tensor_count, _MIN_TENSOR_BYTES)
        metadata = reader.read_metadata(metadata_count)
        alignment = _alignment(path, metadata)
        entries = reader.read_tensor_entries(tensor_count)
        data_start = -(-reader.position // alignment) * alignment
        tensors = _Tensors(path, buffer, data_start, alignment).check(entries)
        return GGUFFile(path, version, alignment, metadata, tensors)


class _TensorEntry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


def _map(path: Path) -> mmap.mmap:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{path} is a directory, not a GGUF file")
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{path} is not a regular file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{path} is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ModelFileError(f"{path} can't be read: {error}") from error


class _Reader:
    """Reads values one after the other, never past the end of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.position = 0
        self._buffer = buffer
        self._size = len(buffer)
        self._reading = "the header"

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def uint32(self) -> int:
        return cast(int, self._scalar(_UINT32))

    def uint64(self) -> int:
        return cast(int, self._scalar(_UINT64))

    def read_version(self) -> int:
        """Check the magic bytes and the version, and say what the file is instead."""
        start = self._buffer[:512]
        if start[:4] != MAGIC:
            raise self.fail(_describe_foreign(start))
        self.position = 4
        version = self.uint32()
        if version & 0xFFFF == 0 and version:
            raise self.fail("is a big-endian GGUF file; only little-endian ones are supported")
        if version not in _SUPPORTED_VERSIONS:
            raise self.fail(f"has GGUF version {version}; versions 2 and 3 are supported")
        return version

    def check_count(self, what: str, count: int, min_bytes: int) -> None:
        """Refuse a count of entries that the rest of the file can't hold."""
        available = self._size - self.position
        if count * min_bytes > available:
            raise self.fail(
                f"declares {count} {what}, which need at least {count * min_bytes} bytes, "
                f"but only {available} bytes follow: the file is truncated or damaged"
            )

    def read_metadata(self, count: int) -> dict[str, MetadataValue]:
        metadata: dict[str, MetadataValue] = {}
        for index in range(count):
            self._reading = f"metadata key {index}"
            key = self._string(MAX_KEY_BYTES)
            if not key:
                raise self.fail(f"metadata key {index} is empty")
            if key in metadata:
                raise self.fail(f"metadata key {key!r} appears twice")
            self._reading = f"metadata {key!r}"
            metadata[key] = self._value(self.uint32(), depth=0)
        return metadata

    def read_tensor_entries(self, count: int) -> list[_TensorEntry]:
        entries: dict[str, _TensorEntry] = {}
        for index in range(count):
            self._reading = f"the entry of tensor {index}"
            name = self._string(MAX_KEY_BYTES)
            if not name:
                raise self.fail(f"the name of tensor {index} is empty")
            if name in entries:
                raise self.fail(f"tensor {name!r} appears twice")
            self._reading = f"the entry of tensor {name!r}"
            num_dimensions = self.uint32()
            if num_dimensions > MAX_DIMENSIONS:
                raise self.fail(
                    f"tensor {name!r} has {num_dimensions} dimensions; "
                    f"at most {MAX_DIMENSIONS} are allowed"
                )
            dimensions = [self.uint64() for _ in range(num_dimensions)]
            type_id, offset = self.uint32(), self.uint64()
            entries[name] = _TensorEntry(name, tuple(reversed(dimensions)), type_id, offset)
        return list(entries.values())

    def _truncated(self, need: int) -> ModelFileError:
        return self.fail(
            f"{self._reading} needs {need} bytes at offset {self.position}, "
            f"but the file ends at {self._size}: it is truncated or damaged"
        )

    def _scalar(self, layout: struct.Struct) -> Scalar:
        if self.position + layout.size > self._size:
            raise self._truncated(layout.size)
        value: Scalar = layout.unpack_from(self._buffer, self.position)[0]
        self.position += layout.size
        return value

    def _string(self, max_bytes: int | None = None) -> str:
        length = self.uint64()
        if max_bytes is not None and length > max_bytes:
            raise self.fail(f"{self._reading} has {length} bytes; the limit is {max_bytes}")
        end = self.position + length
        if end > self._size:
            raise self._truncated(length)
        try:
            text = self._buffer[self.position : end].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{self._reading} is not valid UTF-8: {error.reason}") from error
        self.position = end
        return text

    def _value(self, type_id: int, depth: int) -> MetadataValue:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array(depth + 1)
        if type_id not in _SCALAR_FORMATS:
            raise self.fail(f"{self._reading} has the unknown value type {type_id}")
        return self._scalar(struct.Struct("<" + _SCALAR_FORMATS[type_id]))

    def _array(self, depth: int) -> list[MetadataValue]:
        if depth > _MAX_ARRAY_DEPTH:
            raise self.fail(f"{self._reading} nests arrays deeper than {_MAX_ARRAY_DEPTH}")
        type_id, count = self.uint32(), self.uint64()
        if type_id in _SCALAR_FORMATS:
            return self._numbers(_SCALAR_FORMATS[type_id], count)
        if type_id == _STRING:
            self.check_count(f"strings in {self._reading}", count, _UINT64.size)
            return cast(list[MetadataValue], self._strings(count))
        if type_id == _ARRAY:
            self.check_count(f"arrays in {self._reading}", count, 12)
            return [self._array(depth + 1) for _ in range(count)]
        raise self.fail(f"{self._reading} is an array of the unknown value type {type_id}")

    def _numbers(self, code: str, count: int) -> list[MetadataValue]:
        dtype = np.dtype(code).newbyteorder("<")
        if self.position + count * dtype.itemsize > self._size:
            raise self._truncated(count * dtype.itemsize)
        values = np.frombuffer(self._buffer, dtype, count, self.position)
        self.position += count * dtype.itemsize
        return cast(list[MetadataValue], values.tolist())

    def _strings(self, count: int) -> list[str]:
        # A vocabulary has 100,000 strings or more: `_string` without its calls.
        buffer, size, unpack = self._buffer, self._size, _UINT64.unpack_from
        position = self.position
        strings: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                if position > size:
                    raise self._truncated(position - start)
                strings.append(buffer[start:position].decode())
        except struct.error:
            raise self._truncated(_UINT64.size) from None
        except UnicodeDecodeError as error:
            raise self.fail(
                f"string {len(strings)} of {self._reading} is not valid UTF-8: {error.reason}"
            ) from error
        self.position = position
        return strings


def _describe_foreign(start: bytes) -> str:
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "is a web page, not a GGUF file; the download went to a page instead of the file"
    if text.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not a GGUF file; fetch the file itself with `git lfs pull`"
    if MAGIC.startswith(start):
        return f"is only {len(start)} bytes long: the file is truncated"
    return f"is not a GGUF file: it starts with {start[:4]!r}, not {MAGIC!r}"


def _alignment(path: Path, metadata: dict[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or isinstance(alignment, bool)
        or alignment < 1
        or alignment & (alignment - 1)
    ):
        raise ModelFileError(
            f"{path}: general.alignment must be a positive power of two, got {alignment!r}"
        )
    return alignment


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Turns the tensor entries of a file into weights over its map."""

    path: Path
    buffer: mmap.mmap
    data_start: int
    alignment: int

    def check(self, entries: list[_TensorEntry]) -> dict[str, WeightTensor]:
        """All entries as weights, none of which passes the file or overlaps another."""
        tensors = {entry.name: self._tensor(entry) for entry in entries}
        end, previous = 0, ""
        for entry in sorted(entries, key=lambda entry: entry.offset):
            size = tensors[entry.name].data.size
            if not size:
                continue
            if entry.offset < end:
                raise self._fail(entry.name, f"overlaps tensor {previous!r}")
            end, previous = entry.offset + size, entry.name
        return tensors

    def _fail(self, name: str, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: tensor {name!r} {message}")

    def _tensor(self, entry: _TensorEntry) -> WeightTensor:
        weight_type = self._type(entry)
        num_elements = math.prod(entry.shape)
        row_length, block = entry.shape[-1] if entry.shape else 1, FORMATS[weight_type].elements
        if row_length % block:
            raise self._fail(
                entry.name,
                f"has rows of {row_length} values; {weight_type} needs a multiple of {block}",
            )
        if entry.offset % self.alignment:
            raise self._fail(
                entry.name,
                f"lies at offset {entry.offset}, not a multiple of the alignment {self.alignment}",
            )
        data = self._data(entry, num_bytes(weight_type, num_elements))
        return WeightTensor(entry.name, entry.shape, weight_type, data)

    def _type(self, entry: _TensorEntry) -> WeightType:
        name = _TYPE_NAMES.get(entry.type_id, f"unknown type {entry.type_id}")
        if name in WeightType.__members__:
            return WeightType[name]
        raise self._fail(entry.name, f"is stored as {name}; supported are {', '.join(WeightType)}")

    def _data(self, entry: _TensorEntry, size: int) -> npt.NDArray[np.uint8]:
        if size == 0:
            return np.empty(0, np.uint8)
        start = self.data_start + entry.offset
        if start + size > len(self.buffer):
            raise self._fail(
                entry.name,
                f"needs bytes {start} to {start + size}, but the file ends at "
                f"{len(self.buffer)}: it is truncated or damaged",
            )
        return np.frombuffer(self.buffer, np.uint8, size, start)
