"""Compares two safetensors files: names, dtypes, shapes, bytes and metadata. Standard library only.

With --rows NAME[a:b] the first file must hold exactly those rows of that tensor of the second.
"""

import argparse
import json
import re
import struct
import sys


def load(path):
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = data[8 + length :]
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], body[start:end])
    return metadata, tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("restored")
    parser.add_argument("original")
    parser.add_argument("--rows")
    arguments = parser.parse_args()
    restored, original = load(arguments.restored), load(arguments.original)
    if arguments.rows:
        name, first, last = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", arguments.rows).groups()
        first, last = int(first), int(last)
        dtype, shape, body = original[1][name]
        row = len(body) // shape[0]
        original = (original[0], {name: (dtype, [last - first, *shape[1:]], body[first * row : last * row])})
    if restored != original:
        different = sorted(
            name for name in restored[1].keys() | original[1].keys() if restored[1].get(name) != original[1].get(name)
        )
        sys.exit(f"different: metadata {restored[0] != original[0]}, tensors {different}")
    total = sum(len(body) for _, _, body in restored[1].values())
    print(f"equal: {len(restored[1])} tensors, {total} bytes, metadata {restored[0]}")


if __name__ == "__main__":
    main()
