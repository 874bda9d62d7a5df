"""Forges the page headers of a Parquet file: every page with a header of few bytes claims 2 GiB, as no writer would. The length of the
file stays the same. Used by `statistics.py` and `catalogs.py`."""

import io

import pyarrow as pa
import pyarrow.parquet as pq

CLAIM = 2**31 - 1


def forged(table: pa.Table, **options) -> bytes:
    """A file of the table in which the first page of each column claims 2 GiB."""
    out = io.BytesIO()
    # The bytes of the checksum make room for the larger number.
    pq.write_table(table, out, **{"compression": "snappy", "write_page_checksum": True, **options})
    file, metadata = bytearray(out.getvalue()), pq.read_metadata(out)
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            offset = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
            forge(file, offset)
    return bytes(file)


def forge(file: bytearray, offset: int) -> None:
    """Rewrites the first fields of a page header: type, uncompressed size, compressed size, checksum, header of the kind of page."""
    at, fields = offset, []
    for _ in range(4):
        # Each of these fields follows the one before, and is a number of 32 bits.
        assert file[at] == 0x15, "not the fields that pyarrow writes"
        end = at + 1
        while file[end] & 0x80:
            end += 1
        fields.append(bytes(file[at : end + 1]))
        at = end + 1
    kind, _, stored, _ = fields
    # The last of them names its distance from the field before, the checksum, which goes.
    assert file[at] in (0x1C, 0x3C), "the header of a data page or of a dictionary"
    last, claimed = bytes([file[at] + 0x10]), bytes([0x15]) + varint(2 * CLAIM)
    room = at + 1 - offset - len(kind + claimed + stored + last)
    assert room >= 0, "the checksum is too short"
    padded = stored if room == 0 else stored[:-1] + bytes([stored[-1] | 0x80] + [0x80] * (room - 1) + [0])
    file[offset : at + 1] = kind + claimed + padded + last


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
