"""Small files in the shape of published formats, written for these tests."""

from typing import Any

USER = {"role": "user", "content": "Why?"}
REPLY = {"role": "assistant", "content": "So it is."}


def at(second: int) -> str:
    return f"2026-11-30T07:00:{second:02}.250Z"


# -- Codex: the second token_count repeats the first ---------------------------


def item(second: int, kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": at(second), "type": kind, "payload": payload}


def codex_text(second: int, role: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text" if role == "assistant" else "input_text", "text": text}]
    return item(second, "response_item", type="message", role=role, content=content)


def codex_usage(second: int, prompt: int, cached: int, total: int) -> dict[str, Any]:
    last = {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": 7, "reasoning_output_tokens": 2}
    return item(second, "event_msg", type="token_count", info={"last_token_usage": last, "total_token_usage": total})


CODEX = [
    item(0, "session_meta", id="c1", cwd="/w", base_instructions={"text": "You are kind."}),
    item(0, "turn_context", cwd="/w", model="m"),
    codex_text(1, "user", "Fix it."),
    item(1, "event_msg", type="user_message", message="Fix it."),
    item(4, "response_item", type="reasoning", summary=[], encrypted_content="gAAA"),
    item(5, "response_item", type="function_call", name="shell", arguments='{"command":["ls"]}', call_id="1"),
    codex_usage(5, 100, 0, 100),
    item(6, "response_item", type="function_call_output", call_id="1", output="a.py"),
    codex_text(9, "assistant", "It is fixed."),
    codex_usage(9, 130, 96, 230),
    codex_usage(9, 130, 96, 230),
]

# -- Claude Code: the answer has two parts, in two lines -----------------------


def claude(kind: str, uuid: str, parent: str | None, content: Any, second: int, **more: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content, **more.pop("message", {})}
    head = {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s1", "timestamp": at(second)}
    return {**head, "isSidechain": False, "message": message, **more}


def claude_answer(uuid: str, parent: str, name: str, part: dict[str, Any], cached: int, **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 4, "cache_creation_input_tokens": 96 - cached, "cache_read_input_tokens": cached}
    message = {"id": name, "model": "claude", "usage": {**usage, "output_tokens": 9}}
    return claude("assistant", uuid, parent, [part], 5, message=message, **more)


TOOL_USE = {"type": "tool_use", "id": "t", "name": "Read", "input": {"file": "a.py"}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x = 1"}]}
CLAUDE_CODE = [
    {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}},
    claude("user", "u1", None, "Read it.", 1),
    claude_answer("a1", "u1", "m1", {"type": "text", "text": "I read."}, 0),
    claude_answer("a2", "a1", "m1", TOOL_USE, 0),
    claude("user", "u2", "a2", [TOOL_RESULT], 7),
    claude_answer("a3", "u2", "m2", {"type": "text", "text": "x is 1."}, 64),
]

# -- other agents --------------------------------------------------------------

ROUND = {"session_id": "codex:1", "round_index": 0, "input_tokens_total": 640, "prefix_tokens": 0}
ROUND |= {"newly_append_tokens": 640, "output_tokens": 128, "reasoning_output_tokens": 64, "tools": []}
ROUND |= {
    "timing_events": [{"event_type": "user_message", "timestamp": at(1)}, {"event_type": "text", "timestamp": at(4)}]
}
STEP = {
    "action": "ls",
    "observation": "a.py",
    "response": "Look.\nls",
    "query": [{"role": "system", "content": "Act."}, USER],
}
SWE_AGENT = {"trajectory": [STEP], "history": [USER, REPLY], "info": {"exit_status": "submitted"}}
MINI_SWE_AGENT = {
    "info": {"exit_status": "Submitted"},
    "trajectory_format": "mini-swe-agent-1.1",
    "messages": [
        {"role": "system", "content": "Act."},
        USER,
        {**REPLY, "extra": {"response": {"usage": {"prompt_tokens": 40, "completion_tokens": 4}}}},
        {"role": "exit", "content": "done"},
    ],
}
MODEL_RESPONSE = {
    "id": "r1",
    "choices": [{"message": {"content": "Look.", "tool_calls": [{"function": {"name": "run"}}]}}],
    "usage": {"prompt_tokens": 50, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 32}},
}
CALL = {"tool_call_metadata": {"model_response": MODEL_RESPONSE, "tool_call_id": "1"}}
OPEN_HANDS = [
    {"id": 0, "timestamp": at(0), "source": "agent", "action": "system", "args": {"content": "Act."}},
    {"id": 1, "timestamp": at(1), "source": "user", "action": "message", "args": {"content": "Fix it."}},
    {"id": 2, "timestamp": at(2), "source": "agent", "action": "run", "args": {"command": "ls"}, **CALL},
    {"id": 3, "timestamp": at(3), "source": "agent", "observation": "run", "content": "a.py", "cause": 2},
    {"id": 4, "timestamp": at(4), "source": "agent", "action": "finish", "args": {"thought": "It is done."}},
]
OPEN_HANDS_1 = [
    {"kind": "SystemPromptEvent", "source": "agent", "system_prompt": {"type": "text", "text": "Act."}, "tools": []},
    {"kind": "MessageEvent", "source": "user", "llm_message": {"role": "user", "content": [{"text": "Fix it."}]}},
    {
        "kind": "ActionEvent",
        "source": "agent",
        "thought": [{"text": "Look."}],
        "tool_call": {"name": "terminal", "arguments": "{}"},
        "llm_response_id": "r1",
    },
    {"kind": "ObservationEvent", "source": "environment", "observation": {"content": [{"text": "a.py"}]}},
    {"kind": "MessageEvent", "source": "agent", "llm_message": {"role": "assistant", "content": [{"text": "Done."}]}},
]

# -- chats, inputs and logs ----------------------------------------------------

LMSYS = {"conversation_id": "q", "model": "m", "conversation": [USER, REPLY], "turn": 1, "language": "English"}
TURNS = [{"role": "system", "text": "Be kind."}, {"text": "Why?", "output_length": 5}, {"text": "So?", "delay": 1500}]
AIPERF = {"session_id": "a", "turns": TURNS}
BATCH = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [USER]}}
ANSWER = {"choices": [{"message": REPLY}]}
ANSWER |= {"usage": {"prompt_tokens": 30, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}}
LITE_LLM = {"id": "1", "trace_id": "t", "call_type": "acompletion", "startTime": 1700.5, "messages": [USER]}
LITE_LLM |= {"response": ANSWER, "prompt_tokens": 30, "completion_tokens": 3, "status": "success"}


def attribute(name: str, value: Any) -> dict[str, Any]:
    return {"key": name, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}


ASKED = '[{"role": "user", "parts": [{"type": "text", "content": "Why?"}]}]'
ANSWERED = '[{"role": "assistant", "parts": [{"type": "text", "content": "So it is."}]}]'
SPAN = {
    "name": "chat m",
    "startTimeUnixNano": "1700000000500000000",
    "attributes": [
        attribute("gen_ai.conversation.id", "s"),
        attribute("gen_ai.input.messages", ASKED),
        attribute("gen_ai.output.messages", ANSWERED),
        attribute("gen_ai.usage.input_tokens", 30),
        attribute("gen_ai.usage.cache_read.input_tokens", 16),
    ],
}
SPANS = {"resourceSpans": [{"scopeSpans": [{"spans": [SPAN, {"name": "tool", "attributes": []}]}]}]}
ID_LINE = "[logger.py:41] Received request cmpl-1: prompt: 'It\\'s, params: so', params: SamplingParams(n=1), "
OUTPUT_LINE = "[logger.py:71] Generated response cmpl-1: output: 'Yes', output_token_ids: [8, 9], finish_reason: stop"
TEXT_LINE = "[logger.py:49] Request cmpl-2 details: prompt: 'Why not?', prompt_token_ids: None, "
VLLM = [
    "INFO 11-30 07:00:01 [api_server.py:1] vLLM API server version 0.10.0",
    f"INFO 11-30 07:00:02 {ID_LINE}prompt_token_ids: [5, 6, 7], prompt_embeds shape: None, lora_request: None.",
    f"INFO 11-30 07:00:03 {OUTPUT_LINE}",
    f"DEBUG 11-30 07:00:04 {TEXT_LINE}prompt_embeds shape: None.",
    "INFO 11-30 07:00:05 [logger.py:41] Received request cmpl-3: params: SamplingParams(n=1), lora_request: None.",
]
FIRST: dict[str, list[Any]] = {
    "Codex": CODEX,
    "Claude Code": CLAUDE_CODE,
    "TraceLab": [ROUND],
    "OpenHands": OPEN_HANDS,
    "SWE-agent": [SWE_AGENT],
    "LMSYS-Chat": [LMSYS],
    "AIPerf": [AIPERF],
    "OpenAI batches": [BATCH],
    "LiteLLM": [LITE_LLM],
    "OpenTelemetry spans": [SPANS],
    "vLLM logs": VLLM,
}
