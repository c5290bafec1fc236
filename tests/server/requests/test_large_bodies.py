"""Large bodies: refused while they arrive, or parsed without a pause for others."""

import json
import random
import re
import threading
import time
from dataclasses import replace
from itertools import pairwise

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from headwater.errors import RequestTooLarge
from headwater.server.http.errors import RefusedBody
from headwater.server.prompt import encoding, segments
from headwater.server.prompt.encoding import check_length, longest_token
from headwater.server.requests import body as bodies
from headwater.server.requests.body import MAX_BYTES, MAX_DEPTH, MIN_CONTAINERS, MIN_VALUES, BodyLimits, BodyScan
from tests.forked import address, listening
from tests.server.client import error, send
from tests.server.fake_engine import byte_tokenizer
from tests.server.http.test_slow_clients import running  # noqa: F401  a fixture
from tests.test_serve import started

MIB = 2**20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMITS = BodyLimits.of(4096, 12, 1)


def body(value):
    return b'{"max_tokens": 1, "prompt": ' + value + b"}"


SPRAWLING = [  # bodies that a parser would work on for seconds, and what their refusal says
    (body(b"[" + b"[]," * MIB + b"[]]"), ["lists and objects", f"{MIN_CONTAINERS:,}"]),
    (body(b'"a", "x": [' + b"{}," * MIB + b"{}]"), ["lists and objects", f"{MIN_CONTAINERS:,}"]),
    (body(b"[" + b"1," * MIB + b"1]"), ["values", f"{MIN_VALUES:,}"]),
    (body(b"[" + b'"",' * MIB + b'""]'), ["values", f"{MIN_VALUES:,}"]),
    (body(b" " * 4 * MIB + b'"a"'), ["bytes outside of texts", "3,200,000"]),
    (body(b'"' + b"a" * 2 * MIB + b'", "x": ' + b"[" * 100 + b"]" * 100), [f"{MAX_DEPTH} deep"]),
]


@pytest.mark.parametrize(("content", "said"), SPRAWLING)
def test_sprawling_body_is_refused_before_it_is_parsed(engine, monkeypatch, content, said):
    monkeypatch.setattr(bodies, "parse", None)  # fails if it is called
    engine.max_model_len = 400_000 if b"aaa" in content else 4096  # at which a text of 2 MiB is no reason to refuse
    told = error(send(engine, "POST", COMPLETIONS, content=content))
    assert all(part in told["message"] for part in said), told


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/v1/responses"])
def test_text_of_too_many_tokens_is_refused_before_it_is_parsed(engine, monkeypatch, path):
    monkeypatch.setattr(bodies, "parse", None)
    told = error(send(engine, "POST", path, content=body(b'"' + b"a " * MIB + b'"')))
    assert told["code"] == "context_length_exceeded"
    found, least, most = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", told["message"])[:3])
    assert found // 12 == least > most == 4096


def test_body_below_the_limits_is_served(engine):
    """Many token ids, and many texts, of more than a mebibyte together."""
    ids = json.dumps({"tokens": [200] * 190_000}, indent=1).encode()
    history = ['wörd \\ "quoted"\n' * 2000] * 30
    texts = json.dumps({"messages": [{"role": "user", "content": "hi"}], "metadata": history}, ensure_ascii=False)
    for path, content in (("/detokenize", ids), (CHAT, texts.encode())):
        assert MIB < len(content) < MAX_BYTES
        assert send(engine, "POST", path, content=content).status_code == 200


def scanned(raw, limits=LIMITS, cuts=()):
    scan, starts = BodyScan(limits), [0, *cuts, len(raw)]
    for start, end in pairwise(starts):
        for _ in scan.take(raw[start:end]):
            pass


def test_body_scan_counts_equal_the_parsers():
    """In any pieces: quotes and brackets in texts are text, and escapes may be cut anywhere."""
    draw = random.Random(4)
    texts = ["", '"', "\\", '\\"', "[{,:", "\\\\", "é🙂", '\n\t"', "plain"]

    def value(depth):
        kind = draw.randrange(5 if depth else 3)
        if kind < 2:
            return draw.choice([None, True, 7, -1.5e3, *texts])
        if kind == 2:
            return draw.choice(texts) * draw.randrange(4)
        if kind == 3:
            return [value(depth - 1) for _ in range(draw.randrange(1, 5))]
        return {f"{draw.choice(texts)}{i}": value(depth - 1) for i in range(draw.randrange(1, 5))}

    def containers(one):
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else None
        return 0 if inner is None else 1 + sum(map(containers, inner))

    def values(one):
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        return 1 + sum(map(values, inner))

    for _ in range(200):
        sent = [value(6)]
        raw = 2 * json.dumps(sent, ensure_ascii=draw.random() < 0.5).encode()  # twice: the first ends as it began
        cuts = sorted(draw.randrange(len(raw)) for _ in range(5))
        exact = replace(LIMITS, containers=2 * containers(sent), values=2 * (values(sent) - 1))
        scanned(raw, exact, cuts)
        scanned(raw + b"[" * MAX_DEPTH)
        with pytest.raises(RefusedBody, match="nested more than"):
            scanned(raw + b"[" * (MAX_DEPTH + 1))
        for name, shown in (("containers", "lists and objects"), ("values", "values")):
            with pytest.raises(RefusedBody, match=rf"body has {getattr(exact, name):,} {shown} or more"):
                scanned(raw, replace(exact, **{name: getattr(exact, name) - 1}), cuts)


@pytest.mark.parametrize("escape", [b"\\n", b"\\u4e2d", b"\\\\", b'\\"', b"ab"])
def test_escaped_text_counts_no_more_than_its_bytes(escape):
    limits = BodyLimits.of(100_000, 10, 1)
    text = escape * (10**6 // len(escape))
    decoded = len(json.loads(b'"' + text + b'"').encode())
    scanned(b'{"prompt": "' + text, replace(limits, tokens=decoded, token_bytes=1))
    with pytest.raises(RefusedBody, match=r"at least .* tokens"):
        scanned(b'{"prompt": "' + text + b"a" * 1_200_000, limits)


def test_limit_of_a_body_follows_from_the_longest_prompt():
    assert BodyLimits.of(4096, 12, 1).bytes == 16 * MIN_VALUES + 6 * 4096 * 12
    assert BodyLimits.of(4096, 12, 272).bytes == BodyLimits.of(4096, None, 1).bytes == MAX_BYTES
    million = BodyLimits.of(10**6, 1024, 272)
    assert (million.values, million.containers) == (2 * 10**6, 250_000)


def test_long_text_is_encoded_only_up_to_the_limit(monkeypatch):
    counted = []
    encode = encoding.encode

    def counting(tokenizer, text, add_special_tokens):
        counted.append(len(text))
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(encoding, "encode", counting)
    tokenizer = byte_tokenizer()
    check_length(tokenizer, "a" * 16_384, 4096, None)  # short enough to be encoded at once
    assert counted == []
    with pytest.raises(RequestTooLarge, match=r"65,472 tokens or more, 4,096 are accepted"):
        check_length(tokenizer, "a" * MIB, 4096, None)
    assert counted == [encoding.SLICE_CHARACTERS]
    with pytest.raises(RequestTooLarge, match=r"87,381 tokens or more, 4,096 are accepted"):
        check_length(tokenizer, "a" * MIB, 4096, 12)
    assert len(counted) == 1  # not encoded at all


@pytest.mark.parametrize(
    "fields", [{"prompt": "a" * 900_000}, {"messages": [{"role": "user", "content": "a" * 900_000}]}]
)
def test_prompt_far_too_long_is_not_encoded(engine, monkeypatch, fields):
    longest = []
    encode = encoding.encode

    def noting(tokenizer, text, add_special_tokens):
        longest.append(len(text))
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(encoding, "encode", noting)
    monkeypatch.setattr(segments, "longest_token", lambda tokenizer: None)
    path = COMPLETIONS if "prompt" in fields else CHAT
    told = error(send(engine, "POST", path, json=fields))
    assert told["code"] == "context_length_exceeded"
    assert max(longest) <= encoding.SLICE_CHARACTERS


def test_longest_token_bounds_every_text():
    tokenizer = byte_tokenizer()
    assert longest_token(tokenizer) == len("<|im_start|>")
    tokenizer.normalizer = normalizers.NFC()
    assert longest_token(tokenizer) == 4 * len("<|im_start|>")


def _with(**parts):
    tokenizer = byte_tokenizer.__wrapped__()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def test_tokenizers_that_drop_text_have_no_longest_token():
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    dropping = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), level])
    keeping = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), level])
    assert longest_token(_with(pre_tokenizer=keeping)) == len("<|im_start|>")
    assert longest_token(_with(pre_tokenizer=dropping)) is None
    assert longest_token(_with(pre_tokenizer=pre_tokenizers.Whitespace())) is None
    assert longest_token(_with(normalizer=normalizers.Strip())) is None
    assert longest_token(Tokenizer(models.WordLevel({"a": 0}, "a"))) is None
    assert longest_token(Tokenizer(models.BPE({"a": 0}, []))) is None
    absorbing = _with()
    absorbing.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    assert longest_token(absorbing) is None


def test_sixteen_large_bodies_at_once_delay_no_others(running, engine):  # noqa: F811
    """Bodies over the limits are refused; /health is answered meanwhile. The bound is for a busy machine."""
    server = running()
    contents = [content for content, _ in SPRAWLING] + [body(b'"' + b"a " * MIB + b'"')]
    answers, waits = [], []

    def post(content):
        answers.append(httpx.post(f"{server.url}{COMPLETIONS}", content=content, timeout=60).status_code)

    threads = [threading.Thread(target=post, args=(contents[n % len(contents)],)) for n in range(16)]
    for thread in threads:
        thread.start()
    with httpx.Client() as client:
        while any(thread.is_alive() for thread in threads) or len(waits) < 3:
            begin = time.monotonic()
            assert client.get(f"{server.url}/health", timeout=20).status_code == 200
            waits.append(time.monotonic() - begin)
    assert answers == [400] * 16
    assert max(waits) < 5
    assert engine.seen == []


@pytest.mark.full
def test_large_bodies_take_little_memory_and_time():
    """60 MB of lists and objects and 16 MB of words, each and all at once, against a process."""
    large = [body(b"[" + b"[]," * 20 * MIB + b"[]]"), body(b'"a", "x": [' + b"{}," * 20 * MIB + b"{}]")]
    words = body(b'"' + b"a " * 8 * MIB + b'"')
    with listening(started("--port", "0")) as (server, said):
        port = int(re.search(r":(\d+)/v1", address(said))[1])
        url = f"http://127.0.0.1:{port}"
        before = peak_memory(server.pid)
        for content in (*large, words):
            begin = time.monotonic()
            assert httpx.post(f"{url}{COMPLETIONS}", content=content, timeout=60).status_code in (400, 413)
            assert time.monotonic() - begin < 4
        assert peak_memory(server.pid) - before < 4 * len(words)


def peak_memory(pid):
    with open(f"/proc/{pid}/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+)", status.read())[1]) * 1024
