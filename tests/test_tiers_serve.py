"""`headwater serve --tier` and `headwater tiers` as processes: killed, restarted, checked, cleared."""

import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.forked import PATIENCE, address, headwater, serving
from tests.redis_server import redis_server

PROMPT = "the quiet river flows under the old stone bridge and " * 60
ASKED = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1}


def asked(said: list[str], **more) -> dict:
    response = httpx.post(f"{address(said)}/completions", json=ASKED | more, timeout=PATIENCE)
    response.raise_for_status()
    return response.json()


def figures(said: list[str]) -> dict:
    return httpx.get(f"{address(said).removesuffix('/v1')}/cache").json()


def tiers(*arguments: str) -> subprocess.CompletedProcess[str]:
    return headwater("tiers", *arguments)


def stored(said: list[str], parts: int = 2) -> None:
    """Wait until copies are made."""
    deadline = time.monotonic() + PATIENCE
    while figures(said)["tiers"][0]["written"] < parts:
        assert time.monotonic() < deadline, figures(said)["tiers"]
        time.sleep(0.05)


@pytest.fixture(params=[pytest.param("disk", marks=pytest.mark.full), "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "disk":
        yield f"disk:{tmp_path / 'tier'},size=1GB"
    else:
        with redis_server(tmp_path) as server:
            yield f"{server.url},size=1GB"


def test_a_killed_server_has_stored_all_and_the_next_one_answers_alike(place: str, tmp_path: Path) -> None:
    key = str(tmp_path / "key")
    flags = "--port", "0", "--tier", place, "--tier-key", key, "--tier-store", "through"
    with serving(*flags) as (process, said):
        first = asked(said)
        stored(said)
        process.kill()
    with serving(*flags) as (_, said):
        again = asked(said)
    account = again["usage"]["headwater"] if "headwater" in again["usage"] else again["headwater"]
    assert account["tier_outcome"] in ("loaded", "computing_is_faster")  # the embedded model may compute faster
    assert first["choices"] == again["choices"]
    for given, model in (((), "unknown"), (("--tier-key", key), "headwater-tiny")):
        listed = tiers("ls", place, *given)
        assert re.search(r"states\s*│\s*[1-9]", listed.stdout), listed
        assert re.search(rf"^│ [0-9a-f]{{8}}\s*│\s*[1-9]\d*\s*│\s*[\d,]+\s*│\s*{model}", listed.stdout, re.M), listed
    checked = tiers("verify", place, "--tier-key", key)
    assert checked.returncode == 0, checked
    assert re.search(r"^\d+ parts are whole, 0 are not$", checked.stdout, re.M)
    assert tiers("gc", place).stdout == "0 parts were deleted\n"
    cleared = tiers("clear", place, "--yes")
    assert re.fullmatch(r"[1-9]\d* parts were deleted\n", cleared.stdout), cleared
    assert tiers("clear", place, "--yes").stdout == "0 parts were deleted\n"


@pytest.mark.full
def test_documents_are_read_from_disk_after_a_restart(tmp_path: Path) -> None:
    """The second server answers the same documents, in another order, without building any."""
    place, key = f"disk:{tmp_path / 'tier'}", str(tmp_path / "key")
    flags = "--port", "0", "--tier", place, "--tier-key", key, "--tier-timeout", "30"
    texts = [" ".join(f"Clerk {i} of house {number} keeps key {i * number}." for i in range(120)) for number in (3, 7)]

    def answer(said: list[str], documents: list[str]) -> dict:
        body = {
            "messages": [{"role": "user", "content": "Which key does clerk 5 of house 7 keep?"}],
            "documents": [{"text": text} for text in documents],
            "fidelity": "fast", "max_tokens": 8, "temperature": 0, "logprobs": True,
        }  # fmt: skip
        response = httpx.post(f"{address(said)}/chat/completions", json=body, timeout=PATIENCE)
        response.raise_for_status()
        return response.json()

    with serving(*flags) as (process, said):
        answer(said, texts)
        turned = answer(said, texts[::-1])
        process.terminate()
        assert process.wait(PATIENCE) == 0
    with serving(*flags) as (_, said):
        again = answer(said, texts[::-1])
        shown = figures(said)
        metrics = httpx.get(f"{address(said).removesuffix('/v1')}/metrics").text
    account = again["headwater"]
    assert (account["segments"], account["loaded_segments"], account["cold_tokens"]) == (2, 2, 0)
    assert (account["tier_outcome"], account["loaded_from"]) == ("loaded", "disk")
    assert account["loaded_tokens"] >= account["composed_tokens"] > 1000
    assert shown["since_start"]["loaded_segments"] == 2
    assert "headwater_loaded_segments_total 2.0" in metrics
    assert 'headwater_computed_tokens_total{kind="segment"} 0.0' in metrics
    assert again["choices"] == turned["choices"]
    assert re.search(r"segments\s*│\s*2 ", tiers("ls", place).stdout)
    assert tiers("verify", place, "--tier-key", key).returncode == 0


@pytest.mark.full
def test_entries_of_the_head_are_stored_if_it_drafts(tmp_path: Path) -> None:
    """A server with the head, and then one without it, resume from one folder and answer alike."""
    place, key = f"disk:{tmp_path / 'tier'}", str(tmp_path / "key")
    flags = "--port", "0", "--tier", place, "--tier-key", key, "--tier-timeout", "30"
    answers = []
    for speculation in ("mtp", "mtp", "off"):
        with serving(*flags, "--speculation", speculation) as (process, said):
            answers.append(asked(said))
            process.terminate()
            assert process.wait(PATIENCE) == 0
    outcomes = [answer["headwater"]["tier_outcome"] for answer in answers]
    assert outcomes[0] == "tier_miss"
    assert set(outcomes[1:]) <= {"loaded", "computing_is_faster"}  # the embedded model may compute faster
    assert answers[0]["choices"] == answers[1]["choices"] == answers[2]["choices"]
    assert re.search(r"entries of the MTP head\s*│\s*[1-9]", tiers("ls", place).stdout)
    assert tiers("verify", place, "--tier-key", key).returncode == 0


@pytest.mark.full
def test_selective_storing_flushes_at_sigterm_for_servers_of_this_fingerprint(tmp_path: Path) -> None:
    place = f"disk:{tmp_path / 'tier'}"
    flags = "--port", "0", "--tier", place, "--tier-key", str(tmp_path / "key"), "--page-size"
    with serving(*flags, "128") as (process, said):
        asked(said)
        assert figures(said)["tiers"][0]["written"] == 0
        process.terminate()
        assert process.wait(PATIENCE) == 0
    assert re.search(r"states\s*│\s*[1-9]", tiers("ls", place).stdout)
    with serving(*flags, "64") as (_, said):
        deadline = time.monotonic() + PATIENCE
        while not figures(said)["tiers"][0]["other_states"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert asked(said)["headwater"]["tier_outcome"] == "other_fingerprint"


@pytest.mark.full
def test_verify_finds_a_flipped_byte(tmp_path: Path) -> None:
    place, key = f"disk:{tmp_path / 'tier'}", str(tmp_path / "key")
    with serving("--port", "0", "--tier", place, "--tier-key", key) as (process, said):
        asked(said)
        process.terminate()
        process.wait(PATIENCE)
    file = next(path for path in (tmp_path / "tier").rglob("s*") if path.is_file())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (tmp_path / "other").write_text(bytes(32).hex())
    (tmp_path / "other").chmod(0o600)
    other = tiers("verify", place, "--tier-key", str(tmp_path / "other"), "--delete")
    assert (other.returncode, other.stdout) == (2, ""), "a key of other servers deletes nothing"
    assert re.match(r"headwater: none of \d+ parts was stored with the key ", other.stderr)
    refused = subprocess.run(
        [sys.executable, "-m", "headwater", "tiers", "clear", place], input="n\n", capture_output=True, text=True
    )
    assert (refused.returncode, refused.stderr) == (1, "")
    checked = tiers("verify", place, "--tier-key", key)
    assert checked.returncode == 1
    assert f"{file.name}: its content differs from the stored one\n" in checked.stdout
    assert tiers("verify", place, "--tier-key", key, "--delete").returncode == 1
    assert tiers("verify", place, "--tier-key", key).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("ls", "tape:/x"),
            "a tier is a kind and a place, such as disk:/path,size=100GB or redis://host:6379/0,size=1TB",
        ),
        (("ls", "disk:/no/such/folder"), "'/no/such/folder' is not a folder"),
        (("ls", "disk:/tmp,speed=3"), "a disk tier has the options size=100GB, and no other"),
        (("verify", "disk:/tmp", "--tier-key", "/no/key"), "'/no/key' has no tier key: give --tier-key"),
    ],
)
def test_bad_places_are_one_line(arguments: tuple[str, ...], error: str) -> None:
    run = tiers(*arguments)
    assert (run.returncode, run.stderr) == (2, f"headwater: {error}\n")
