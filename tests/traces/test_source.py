"""Files come packed or not, line by line or as an array; errors name their place."""

from __future__ import annotations

import gzip
import json

import pytest
import zstandard

from headwater.errors import TraceError
from headwater.traces import source
from headwater.traces.source import Source

RECORDS = [{"number": number, "text": "ä\n,]}" * number} for number in range(40)]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
PACKERS = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "frames": lambda text: zstandard.compress(text[:500]) + zstandard.compress(text[500:]),
}


@pytest.fixture(params=PACKERS)
def packed(request, tmp_path):
    """Writes a text, packed in each of the ways; the name does not tell which."""

    def write(text):
        path = tmp_path / "some.jsonl"
        path.write_bytes(PACKERS[request.param](text.encode()))
        return path

    return write


def test_lines_are_records_however_they_are_packed(packed):
    assert list(Source(packed(LINES)).records()) == RECORDS


def test_empty_lines_are_none_and_count(packed):
    read = Source(packed("\n \n" + LINES.replace("\n", "\n\n")))
    assert list(read.records()) == RECORDS
    assert read.place == f"line {2 * len(RECORDS) + 2}"


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_an_array_is_read_element_by_element(tmp_path, monkeypatch, indent, chunk):
    monkeypatch.setattr(source, "CHUNK_BYTES", chunk)
    path = tmp_path / "some.json"
    path.write_text(json.dumps(RECORDS, ensure_ascii=False, indent=indent))
    assert list(Source(path).records()) == RECORDS


def test_lists_of_tokens_are_lines_and_no_array(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("[1, 2]\n[3]\n")
    assert list(Source(path).records()) == [[1, 2], [3]]


def test_line_that_is_not_json_is_an_error_with_its_number(packed):
    path = packed(LINES + "{oops\n")
    with pytest.raises(TraceError, match=rf"some\.jsonl, line {len(RECORDS) + 1}: no JSON: Expecting property name"):
        list(Source(path).records())


def test_truncated_array_is_an_error_with_its_last_element(tmp_path):
    path = tmp_path / "some.json"
    path.write_text(json.dumps(RECORDS)[:-20])
    with pytest.raises(TraceError, match=r"element 39: then no JSON"):
        list(Source(path).records())


@pytest.mark.parametrize("way", ["gzip", "zstd"])
def test_file_that_cannot_be_unpacked_is_an_error(tmp_path, way):
    path = tmp_path / "some.jsonl"
    text = "".join(f"{number * 7919 % 10007}\n" for number in range(5000))
    whole = bytearray(PACKERS[way](text.encode()))
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(TraceError, match=r"some\.jsonl, (after )?line [\d,]+: (cannot be unpacked|no JSON)"):
        list(Source(path).records())
