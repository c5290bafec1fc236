"""`make fuzz` in small: every target runs its seeds, and some mutations of them, without atheris."""

import logging
import random
import sys
from collections.abc import Callable
from types import CodeType, FrameType

import pytest

from headwater.cli.settings import effective
from headwater.config import ServeConfig
from headwater.engine.constraint import ConstraintCompiler, ConstraintMachine
from headwater.engine.detokenizer import TextStream
from headwater.load.answer import Answer, error_message
from headwater.models.gguf.file import read_header
from headwater.models.load import read_spec
from headwater.models.tensors import CheckpointTensors
from headwater.server.answer.formats.json_calls import JsonSection
from headwater.server.answer.formats.parser import AnswerParser
from headwater.server.answer.reply import Reply
from headwater.server.prompt.encoding import PromptEncoder
from headwater.server.requests.body import JsonRequest
from headwater.server.requests.messages import conversation
from headwater.spec import ModelSpec
from stress.fuzz import files
from stress.fuzz.target import Drawn, pieces
from stress.fuzz.targets import TARGETS

MUTATIONS = 60
READ = {  # target -> what every input is given to, and what only one is that was not refused before
    "bodies": (JsonRequest.stream, Reply.whole),
    "fields": (JsonRequest.stream, Reply.whole),
    "formats": (AnswerParser.finish, JsonSection.push),
    "events": (Answer.feed, error_message),
    "texts": (TextStream.__init__, TextStream.push),
    "settings": (effective, ServeConfig.__post_init__),
    "config": (read_spec, ModelSpec.layout),
    "gguf": (read_header, ModelSpec.layout),
    "safetensors": (CheckpointTensors.__init__, CheckpointTensors.raw),
    "messages": (conversation, PromptEncoder.encode),
    "constraints": (ConstraintCompiler.machine, ConstraintMachine.take),
}


def mutated(data: bytes, words: list[bytes], rng: random.Random) -> bytes:
    """A few bytes changed, cut out, or put in."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        put_in = rng.choice([bytes([rng.randrange(256)]), b"", *words])
        out[at : at + rng.randrange(4)] = put_in
    return bytes(out)


def test_error_that_is_not_declared_comes_out(monkeypatch):
    target = TARGETS["config"]

    def broken(path: object) -> None:
        raise ZeroDivisionError("nobody declared it")

    monkeypatch.setattr(files, "read_spec", broken)
    with pytest.raises(ZeroDivisionError):
        target.run(target.seeds[0])


def called(run: Callable[[bytes], None], data: bytes) -> set[CodeType]:
    """The code of all functions that were entered."""
    found: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run(data)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_mutations_are_parsed_and_raise_only_declared_errors(name, caplog):
    caplog.set_level(logging.CRITICAL, "headwater")
    target, rng = TARGETS[name], random.Random(name)
    mutations = [mutated(rng.choice(target.seeds), list(target.words), rng) for _ in range(MUTATIONS)]
    begin, end = (function.__code__ for function in READ[name])
    seeds = [called(target.run, seed) for seed in target.seeds]
    assert all(begin in one for one in (*seeds, *(called(target.run, data) for data in (b"", *mutations))))
    assert any(end in one for one in seeds)


def test_target_that_reads_nothing_is_seen():
    begin, _ = READ["config"]
    assert begin.__code__ not in called(lambda data: None, b"")
    assert set(READ) == set(TARGETS)


def test_any_bytes_give_fuzz_choices():
    drawn = Drawn(b"\x05\x02ab")
    assert (drawn.below(4), drawn.text(9), drawn.below(100), drawn.rest) == (1, "ab", 0, b"")
    assert ["".join(p) for p in pieces(b"\x01\x04", "hello")] == ["h", "ell", "o"]
