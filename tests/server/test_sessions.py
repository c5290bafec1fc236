"""Sessions of ten turns as agents hold them: results of tools, a cut call, a compaction, a cancelled answer."""

from __future__ import annotations

import pytest

from headwater.config import ServeConfig
from headwater.server.app import create_app
from tests.server import templates
from tests.server.agents import AGENTS, Aider, Cline, call_of
from tests.server.client import send_to
from tests.server.templates import published

FORMS = {"qwen3.5-0.8b": "qwen_xml", "granite-4.0-h": "hermes", "nvidia-nemotron-nano-v2": "nemotron"}
OWN = [(templates.STRICT, "qwen_xml"), (templates.DROPPING, "nemotron"), (templates.LINES, "hermes")]
TEMPLATES = [pytest.param(*own, id=name) for own, name in zip(OWN, ("strict", "dropping", "lines"), strict=True)]
TEMPLATES.append(pytest.param(templates.MARKING, "none", id="marking"))
TEMPLATES.append(pytest.param(templates.TURNS, "none", id="turns"))
for one in published():
    TEMPLATES.append(pytest.param(one.values[0], FORMS.get(str(one.id), "none"), id=one.id, marks=one.marks))


HEADER = 32  # tokens of a turn's first line, which tell its role


class Session:
    """Session of one agent with one app. Each step sends a request, whose answer the model writes as scripted."""

    def __init__(self, agent, engine, form):
        self.agent, self.engine, self.form = agent, engine, form
        self.app = create_app(engine, ServeConfig())

    def answer(self, script, taken=True):
        """Send the next request; return its answer. An answer that is not taken was cancelled by the agent."""
        if not self.agent.asks:
            self.agent.say("Continue.")
        self.engine.script = script
        (response,) = send_to(self.app, [("POST", self.agent.path, {"json": self.agent.body()})])
        assert response.status_code == 200, response.text
        if taken:
            self.agent.take(response.json())

    def call(self, **arguments):
        form = "cline" if isinstance(self.agent, Cline | Aider) else self.form
        return f"I will read.\n{call_of(form, **arguments)}"


def held(session):
    """Hold a session of ten requests, and yield after each whether the history before it stands."""
    agent = session.agent
    agent.say("Read a.py, then tell me what it does.")
    session.answer(session.call(path="a.py", all=True))
    yield True
    session.answer(session.call(path="b.py"))
    yield True
    session.answer("It prints <numbers> & 'quotes'.\n\n```python\nprint(1)\n```")
    yield True
    agent.say("And c.py? Think of </think> and <tool_call> as text.")
    cut = session.call(path="a/very/long/name/of/a/file.py", all=False)
    session.answer(cut[:-30])
    yield True
    agent.say("Your call was cut off, try again.")
    session.answer(session.call(path="c.py"))
    yield True
    session.answer("A long answer that its reader stops.", taken=False)
    yield True
    agent.say("Stop. Be brief.")
    session.answer("Yes.")
    yield True
    agent.say("Go on with d.py.")
    session.answer(session.call(path="d.py"))
    yield True
    agent.compact()
    session.answer("It is done.")
    yield False
    agent.say("Thank you.")
    session.answer("")
    yield True


def shared(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(("source", "form"), TEMPLATES)
@pytest.mark.parametrize("name", AGENTS)
def test_session_of_an_agent_is_served_and_hits_from_its_second_request(engine, name, source, form):
    engine.chat_template = source
    session = Session(AGENTS[name](), engine, form)
    for number, stands in enumerate(held(session)):
        if number:
            before, now = engine.seen[-2:]
            known = shared(before.prompt, now.prompt)
            assert known >= 64  # a page: the request hits
            if stands and not session.agent.moves:
                assert known >= (before.boundaries.query_start or 0)  # None: no user's message
            elif not session.agent.moves:
                assert known >= (before.boundaries.system_end or 0) - HEADER
    assert len(engine.seen) == 10
