"""Drafts that clients ask for: `prediction`, `speculation`, and what usage, metrics and /health say of them."""

import pytest

from headwater.config import ServeConfig
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model
from headwater.schedule.speculation import Speculator, speculation_of
from tests.checkpoints import checkpoint
from tests.exactness.rig import Make, verify_every_draft
from tests.server import templates
from tests.server.client import error, send

BODY = {
    "messages": [{"role": "user", "content": "again and again"}],
    "max_tokens": 60,
    "temperature": 0,
    "stop_token_ids": [],
    "ignore_eos": True,
}
CONFIG = ServeConfig(reasoning_format="none", speculation="ngram")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    prepare_process(2)
    numerics.use(Numerics())
    loaded = load_model(checkpoint(tmp_path_factory.mktemp("speculation"), "qwen3_5"), "float32")
    with Make(loaded, SelfCheck(True, None, "compiled"))(500) as rig:
        rig.engine.chat_template = templates.SILENT
        rig.engine.scheduler.speculation = speculation_of("ngram")
        verify_every_draft(rig.engine.scheduler.speculation)
        yield rig.engine


def ask(engine, config=CONFIG, **fields):
    response = send(engine, "POST", "/v1/chat/completions", config, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def drafts(answer) -> tuple[int, int]:
    details = answer["usage"].get("completion_tokens_details", {})
    return details.get("accepted_prediction_tokens", 0), details.get("rejected_prediction_tokens", 0)


@pytest.fixture(scope="module")
def plain(engine):
    return ask(engine, speculation={"drafter": "off"})


def text(answer) -> str:
    return answer["choices"][0]["message"]["content"]


def test_request_that_wants_no_drafts_has_none(plain):
    assert drafts(plain) == (0, 0)


@pytest.mark.parametrize("in_parts", [False, True])
def test_predicted_answer_is_accepted_and_counted(engine, plain, in_parts):
    said = text(plain)
    parts = [{"type": "text", "text": part} for part in (said[:20], said[20:])]
    answer = ask(engine, prediction={"type": "content", "content": parts if in_parts else said})
    assert text(answer) == said
    assert drafts(answer)[0] > 10


def test_prediction_that_is_wrong_changes_nothing(engine, plain):
    answer = ask(engine, prediction={"type": "content", "content": text(plain)[:20] + "something else " * 500})
    assert text(answer) == text(plain)
    assert drafts(answer)[1] > 0


def test_prediction_is_accepted_and_unused_if_speculation_is_off(engine, plain):
    engine.scheduler.speculation, before = speculation_of("off"), engine.scheduler.speculation
    try:
        answer = ask(engine, ServeConfig(reasoning_format="none"), prediction={"type": "content", "content": "x"})
        assert send(engine, "GET", "/health", CONFIG).json()["speculation"] == "off"
    finally:
        engine.scheduler.speculation = before
    assert (text(answer), drafts(answer)) == (text(plain), (0, 0))


def test_few_drafts_of_a_step_are_as_many_as_were_asked_for(engine, plain, monkeypatch):
    proposed, propose = [], Speculator.propose
    monkeypatch.setattr(Speculator, "propose", lambda *given: proposed.append(propose(*given)) or proposed[-1])
    ask(engine, prediction={"type": "content", "content": text(plain)}, speculation={"tokens": 3})
    assert max(map(len, proposed)) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculation": {"drafter": "magic"}}, "speculation.drafter"),
        ({"speculation": {"tokens": 0}}, "speculation.tokens"),
        ({"speculation": {"tokens": 17}}, "speculation.tokens"),
        ({"speculation": {"draft": "off"}}, "speculation.draft"),
        ({"speculation": {"drafter": "mtp"}}, "speculation"),  # no head was loaded
        ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
    ],
)
def test_unknown_drafters_and_predictions_are_refused_by_name(engine, fields, param):
    refused = error(send(engine, "POST", "/v1/chat/completions", CONFIG, json={**BODY, **fields}), 400)
    assert refused["param"].startswith(param)


@pytest.mark.parametrize("has", ["none", "mtp", "draft"])
def test_request_may_name_only_drafters_that_an_auto_server_has(engine, monkeypatch, has):
    path = engine.loaded.path if has == "draft" else None
    config = ServeConfig(reasoning_format="none", speculation="auto", draft_model=path)
    monkeypatch.setattr(engine, "mtp_bytes", int(has == "mtp"))
    for drafter in ("mtp", "draft", "suffix"):
        body = {**BODY, "speculation": {"drafter": drafter}}
        response = send(engine, "POST", "/v1/chat/completions", config, json=body)
        assert response.status_code == (200 if drafter in (has, "suffix") else 400)


def test_drafts_are_counted_in_metrics_health_and_the_overview(engine, plain):
    ask(engine, prediction={"type": "content", "content": text(plain)})
    speculation = engine.scheduler.speculation
    metrics = send(engine, "GET", "/metrics", CONFIG).text
    assert f'headwater_draft_tokens_total{{outcome="accepted"}} {speculation.accepted:.1f}' in metrics
    assert send(engine, "GET", "/health", CONFIG).json()["speculation"] == "ngram"
    since = send(engine, "GET", "/cache", CONFIG).json()["since_start"]
    assert since["drafts"] == {"accepted": speculation.accepted, "rejected": speculation.rejected}
