"""The GGUF reader takes what the `gguf` package writes, and refuses everything else in words."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import TinyModel, write_tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.model.errors import ModelFileError
from shoal.model.gguf import GGUFFile
from shoal.model.loader import open_model
from shoal.model.quantization import dequantize

UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9


def string(text: str | bytes) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def entry(key: str, value_type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def tensor(name: str, dimensions: tuple[int, ...], type_id: int = 0, offset: int = 0) -> bytes:
    layout = f"<I{len(dimensions)}QIQ"
    return string(name) + struct.pack(layout, len(dimensions), *dimensions, type_id, offset)


def file_bytes(
    metadata: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(metadata) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def failure(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_tiny_model(path, TinyModel(tied=False, biases=True))


def test_reads_what_the_gguf_package_reads(tiny: Path) -> None:
    file, peer = GGUFFile.open(tiny), gguf.GGUFReader(tiny)
    fields = {key: field for key, field in peer.fields.items() if not key.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for key, field in fields.items():
        assert file.metadata[key] == pytest.approx(field.contents()), key
    assert list(file.tensors) == [tensor.name for tensor in peer.tensors]
    for expected in peer.tensors:
        read = file.tensors[expected.name]
        assert read.shape == tuple(expected.shape[::-1])
        np.testing.assert_array_equal(dequantize(read), expected.data)
        assert not read.data.flags.writeable


def test_every_kind_of_metadata_value_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "kinds.gguf", "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float64("f64", 1e300)
    writer.add_bool("bool", True)
    writer.add_string("text", "naïve 東京 🐟")
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_array("bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GGUFFile.open(tmp_path / "kinds.gguf").metadata
    expected = {"u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u64": 2**64 - 1}
    expected |= {"i64": -(2**63), "f64": 1e300, "bool": True, "text": "naïve 東京 🐟"}
    expected |= {"nested": [[1, 2], [3]], "bools": [True, False]}
    assert {key: metadata[key] for key in expected} == expected
    assert metadata["bool"] is True


def test_version_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(file_bytes((entry("a", UINT8, b"\x07"),), version=2))
    assert GGUFFile.open(path).metadata == {"a": 7}


@pytest.mark.parametrize(
    ("version", "said"),
    [(1, "version 1"), (4, "version 4"), (0x03000000, "big-endian"), (0x02000000, "big-endian")],
)
def test_other_versions_are_refused_by_number(tmp_path: Path, version: int, said: str) -> None:
    assert said in failure(tmp_path, file_bytes(version=version))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
        (b"\n\n<HTML><head>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        (b"PK\x03\x04 a zip archive", "not a GGUF file"),
        (b"GG", "truncated"),
        (b"", "empty"),
    ],
)
def test_what_is_not_gguf_is_said_to_be_so(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in failure(tmp_path, content)


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a directory"):
        GGUFFile.open(tmp_path)
    with pytest.raises(ModelFileError, match="does not exist"):
        GGUFFile.open(tmp_path / "missing.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUFFile.open("/dev/zero")
    with pytest.raises(ModelFileError, match="can't be read"):
        GGUFFile.open(f"{tmp_path}/nul\0.gguf")


def test_a_file_without_the_right_to_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loop.gguf"
    path.symlink_to(path)  # fails for every user; a mode of 0 does not stop root
    with pytest.raises(ModelFileError, match="can't be read"):
        GGUFFile.open(path)


HUGE = 2**64 - 1
F32, F16, Q4_0, Q2_K = 0, 1, 2, 10


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ((entry("", UINT8, b"\0"),), "key 0 is empty"),
        ((entry("a", UINT8, b"\0"), entry("a", UINT8, b"\0")), "'a' appears twice"),
        ((entry("a", 13, b"\0"),), "'a' has the unknown value type 13"),
        ((entry("a", ARRAY, struct.pack("<IQ", 13, 1)),), "unknown value type 13"),
        ((entry("a", STRING, struct.pack("<Q", HUGE)),), f"needs {HUGE} bytes"),
        ((entry("a", ARRAY, struct.pack("<IQ", UINT32, HUGE)),), "'a' needs"),
        ((entry("a", ARRAY, struct.pack("<IQ", STRING, 2**60)),), f"declares {2**60} strings"),
        ((entry("a", ARRAY, struct.pack("<IQ", ARRAY, 2**60)),), f"declares {2**60} arrays"),
        ((entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 9),), "nests arrays deeper than 4"),
        ((entry("a", STRING, string(b"\xff\xfe")),), "'a' is not valid UTF-8"),
        (
            (entry("a", ARRAY, struct.pack("<IQ", STRING, 2) + string("x") + string(b"\xff")),),
            "string 1 of metadata 'a' is not valid UTF-8",
        ),
        ((entry("k" * 65536, UINT8, b"\0"),), "65536 bytes; the limit is 65535"),
        ((entry("general.alignment", UINT32, struct.pack("<I", 0)),), "power of two, got 0"),
        ((entry("general.alignment", UINT32, struct.pack("<I", 48)),), "power of two, got 48"),
        ((entry("general.alignment", STRING, string("32")),), "power of two, got '32'"),
    ],
)
def test_bad_metadata_is_named(tmp_path: Path, metadata: tuple[bytes, ...], said: str) -> None:
    assert said in failure(tmp_path, file_bytes(metadata))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ((tensor("", (8,)),), "name of tensor 0 is empty"),
        ((tensor("w", (8,)), tensor("w", (8,), offset=32)), "'w' appears twice"),
        ((tensor("w", (1, 1, 1, 1, 1)),), "'w' has 5 dimensions; at most 4"),
        ((tensor("w", (8,), offset=4),), "offset 4, not a multiple of the alignment 32"),
        ((tensor("v", (16,)), tensor("w", (8,), offset=32)), "'w' overlaps tensor 'v'"),
        ((tensor("w", (8,), type_id=Q2_K),), "stored as Q2_K; supported are F32, F16, BF16, Q8_0"),
        ((tensor("w", (8,), type_id=99),), "stored as unknown type 99; supported are"),
        ((tensor("w", (33,), type_id=Q4_0),), "rows of 33 values; Q4_0 needs a multiple of 32"),
        ((tensor("w", (1024,)),), "tensor 'w' needs bytes"),
        ((tensor("w", (8,), offset=2**40),), "tensor 'w' needs bytes"),
        ((tensor("w", (2**32, 2**32), type_id=F16),), "tensor 'w' needs bytes"),
        ((tensor("w", (8,), offset=2**64 - 32),), "tensor 'w' needs bytes"),
    ],
)
def test_bad_tensors_are_named(tmp_path: Path, tensors: tuple[bytes, ...], said: str) -> None:
    assert said in failure(tmp_path, file_bytes(tensors=tensors, data=bytes(128)))


def test_counts_that_the_file_cannot_hold_are_refused_before_reading(tmp_path: Path) -> None:
    for tensors, metadata, what in ((HUGE, 0, "tensors"), (0, HUGE, "metadata entries")):
        message = failure(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, tensors, metadata))
        assert f"declares {HUGE} {what}" in message
        assert "only 0 bytes follow" in message


def test_a_zero_dimension_in_a_88_byte_file_is_a_clean_error(tmp_path: Path) -> None:
    content = file_bytes(tensors=(tensor("w", (0,)),))
    content += bytes(88 - len(content))
    path = tmp_path / "zero.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"lack general\.architecture"):
        open_model(path)


def test_an_empty_tensor_loads(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    empty = tensor("nothing", (0, 5), offset=32)
    path.write_bytes(file_bytes(tensors=(tensor("w", (8,)), empty), data=bytes(32)))
    tensors = GGUFFile.open(path).tensors
    assert tensors["nothing"].shape == (5, 0)
    assert tensors["nothing"].data.size == 0


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_the_stated_alignment_is_honoured(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "aligned.gguf"
    model = TinyModel(alignment=alignment, trailing_padding=100)
    expected = GGUFFile.open(write_tiny_model(tmp_path / "default.gguf"))
    file = GGUFFile.open(write_tiny_model(path, model))
    assert file.alignment == alignment
    for name, values in expected.tensors.items():
        np.testing.assert_array_equal(file.tensors[name].data, values.data)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, tiny: Path) -> None:
    content = tiny.read_bytes()
    assert content.endswith(GGUFFile.open(tiny).tensors["output.weight"].data.tobytes())
    header = [0, 1, 3, 4, 6, 8, 12, 16, 23]
    spread = np.linspace(24, len(content) - 1, 60).astype(int).tolist()
    near_metadata_end = content.index(b"token_embd.weight")
    entries = range(near_metadata_end - 40, near_metadata_end + 400, 9)
    for cut in {*header, *spread, *entries}:
        assert failure(tmp_path, content[:cut])


FUZZED = file_bytes(
    metadata=(
        entry("general.architecture", STRING, string("llama")),
        entry("general.alignment", UINT32, struct.pack("<I", 32)),
        entry("tokens", ARRAY, struct.pack("<IQ", STRING, 3) + string("a") * 3),
        entry("scores", ARRAY, struct.pack("<IQ4f", 6, 4, 0, 1, 2, 3)),
        entry("nested", ARRAY, struct.pack("<IQIQB", ARRAY, 1, UINT8, 1, 7)),
    ),
    tensors=(tensor("w", (8, 4)), tensor("v", (32, 2), type_id=Q4_0, offset=128)),
    data=bytes(192),
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    flips=st.lists(
        st.tuples(st.integers(0, len(FUZZED) - 193), st.integers(0, 255)), min_size=1, max_size=6
    )
)
def test_flipped_bytes_give_success_or_a_model_file_error(
    tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    content = bytearray(FUZZED)
    for position, value in flips:
        content[position] = value
    path = tmp_path / "fuzzed.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        GGUFFile.open(path)
    except ModelFileError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20, f"{len(content)} bytes of file made the reader hold {peak} bytes"
