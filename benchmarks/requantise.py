"""Write a GGUF model file again with its linear weights in another quantisation.

Peers don't read every format that Shoal reads, so that a comparison needs the same model in theirs:

    python benchmarks/requantise.py model.Q4_1.gguf Q4_0 model.Q4_0.gguf

Quantised two-dimensional weights change; the (tied) token embedding keeps its format, as the usual
quantisers keep it, and so do the norms. Needs the `gguf` package alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

EMBEDDINGS = ("token_embd.weight", "output.weight")
FLOATS = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, file_type: int) -> None:
    """Copy every key but those that the writer sets itself; `general.file_type` is replaced."""
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        if field.name == gguf.Keys.General.FILE_TYPE:
            continue
        value_type = field.types[0]
        item_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), value_type, item_type)
    writer.add_file_type(file_type)


def requantise(source: Path, quantisation: str, target: Path) -> None:
    """Write `source` to `target` with its quantised linear weights as `quantisation`.

    Raises:
        NotImplementedError: the `gguf` package can't write that quantisation.
    """
    kind = gguf.GGMLQuantizationType[quantisation]
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, arch=architecture)
    copy_metadata(reader, writer, gguf.LlamaFileType[f"MOSTLY_{quantisation}"])
    for tensor in reader.tensors:
        if tensor.tensor_type in FLOATS or tensor.name in EMBEDDINGS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        data = gguf.quants.quantize(np.ascontiguousarray(weights, np.float32), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("quantisation", help="Q4_0, Q4_1, Q8_0, BF16 or F16")
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    requantise(arguments.source, arguments.quantisation, arguments.target)


if __name__ == "__main__":
    main()
