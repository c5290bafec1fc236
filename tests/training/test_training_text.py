"""Plain text: simple paragraphs, and documents of the test kept apart."""

import json
import random
from pathlib import Path

import pytest
import zstandard

from training import tokenizer
from training.tasks.budget import estimate_prose
from training.tasks.text import NOVELS, fallback, held_out, passages, simple

SIMPLE = "The boat came in at noon. “We’ve been out all night,” the old man said, and tied it to the wall."
DATA = Path(__file__).parents[3] / "shared" / "data"


def write(file: Path, records: dict[str, str]) -> None:
    file.parent.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in records.items())
    file.write_bytes(zstandard.compress(lines.encode()))


def test_documents_are_parted_and_their_signs_made_plain(tmp_path: Path) -> None:
    write(tmp_path / "text_standardebooks" / "train.jsonl.zst", {"a/1": f"I\n\nMarseilles\n\n{SIMPLE}"})
    write(tmp_path / "text_standardebooks" / "valid.jsonl.zst", {"b/1": SIMPLE.replace("boat", "cart")})
    names = [str(number) for number in range(200)]
    write(
        tmp_path / "text_python_docs" / "docs.jsonl.zst", {name: SIMPLE.replace("boat", f"no{name}") for name in names}
    )
    found = passages(tmp_path)
    plain = SIMPLE.replace("“", '"').replace("”", '"').replace("’", "'")
    assert found.novels == {"train": [[plain]], "test": [[plain.replace("boat", "cart")]]}
    assert 0 < len(found.manuals["test"]) < 30
    assert len(found.manuals["test"]) == sum(held_out(name) for name in names)
    assert len(found.manuals["train"]) + len(found.manuals["test"]) == 200


def test_text_other_than_simple_prose_is_excluded() -> None:
    assert simple(SIMPLE.replace("“", '"').replace("”", '"').replace("’", "'"))
    assert not simple("Too short.")
    assert not simple("Call ``read`` with a size, and it gives so many bytes as there are, or fewer at the end.")
    assert not simple(
        "Notwithstanding considerable disagreements, representatives unanimously acknowledged responsibility."
    )
    assert not simple("one and two and three and four and five and six " * 5 + ".")


def test_folder_without_novels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="text_standardebooks"):
        passages(tmp_path)


def test_fallback_has_both_splits() -> None:
    train, test = (set(fallback().paragraphs(split)) for split in ("train", "test"))
    assert len(train) > 3
    assert test
    assert not train & test


def test_passages_fill_their_tokens() -> None:
    count = tokenizer.counter()
    lengths = [
        len(tokenizer.encode(fallback().draw(random.Random(seed), 300, "train", count))[0]) for seed in range(10)
    ]
    assert all(220 < length <= 300 for length in lengths)


def test_real_passages_are_at_most_as_long_as_they_may_be(tmp_path: Path) -> None:
    novels = DATA / NOVELS / "valid.jsonl.zst"
    if not novels.is_file():
        pytest.skip(f"{novels} is missing")
    (tmp_path / NOVELS).mkdir()
    (tmp_path / NOVELS / novels.name).symlink_to(novels)
    found = passages(tmp_path)
    rng = random.Random(1)
    lengths = [len(tokenizer.encode(found.draw(rng, 512, "test", estimate_prose))[0]) for _ in range(40)]
    assert sum(length > 512 for length in lengths) <= 2
    assert sum(lengths) > 0.8 * 40 * 512
