"""Constraints: what may come next, when it ends, what a hostile one may cost; and in a running engine."""

import itertools
import json
import re
import threading

import jsonschema
import pytest
import torch

from headwater.engine import constraint as module
from headwater.engine.constraint import MAX_CACHED, MAX_SOURCE, ConstraintCompiler, ConstraintMachine
from headwater.engine.detokenizer import byte_table
from headwater.engine.sampler import Sampling
from headwater.engine.step_logits import sample
from headwater.errors import ConstraintError, InvalidLogits
from headwater.events import FailedEvent, FinishedEvent
from headwater.request import Constraint, Generation, SamplingParams
from tests.engine.test_detokenizer import byte_level
from tests.engine.test_engine import begin
from tests.exactness.rig import Rig, words

TOKENIZER = byte_level()
SIZE = TOKENIZER.get_vocab_size()
END = TOKENIZER.token_to_id("<|im_end|>")
PADDED = SIZE + 77
TABLE = byte_table(TOKENIZER)

BOUNDED = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "Köln", "日本"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 150},
        "name": {"type": "string", "maxLength": 6},
        "ok": {"type": "boolean"},
    },
    "required": ["kind", "n", "name", "ok"],
    "additionalProperties": False,
}


def schema(value: object) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


def compiler(ends: tuple[int, ...] = (END,)) -> ConstraintCompiler:
    return ConstraintCompiler(TOKENIZER, PADDED, ends)


def allowed(machine: ConstraintMachine) -> set[int]:
    return set(machine.allowed().nonzero()[:, 0].tolist())


def take(machine: ConstraintMachine, text: str) -> None:
    """Token by token, in the tokenizer's own spelling; each must be allowed."""
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        assert token in allowed(machine), (text, TABLE.raw(token))
        machine.take(token)


def follow(machine: ConstraintMachine, n: int) -> int:
    """Up to n tokens at random; tells how many there were."""
    generator = torch.Generator().manual_seed(0)
    for taken in range(n):
        if machine.finished:
            return taken
        machine.take(int(torch.multinomial(machine.allowed().float(), 1, generator=generator)))
    return n


def test_exactly_the_tokens_whose_bytes_fit_are_allowed():
    pattern = re.compile(rb"[a-z ]{1,3}")
    fitting = {t for t in range(SIZE) if pattern.fullmatch(TABLE.raw(t)) and t != END}
    assert allowed(compiler().machine(Constraint("regex", "[a-z ]{1,3}"))) == fitting


def test_a_character_may_come_byte_by_byte():
    machine = compiler().machine(Constraint("regex", "[é🙂]x"))
    for byte in "🙂x".encode():
        token = next(t for t in range(SIZE) if TABLE.raw(t) == bytes([byte]))
        assert token in allowed(machine)
        machine.take(token)
    assert machine.finished


def test_special_tokens_and_padded_ids_match_no_text():
    machine = compiler().machine(Constraint("regex", r"(?s:.{0,40})<\|im_end\|>"))
    assert END not in allowed(machine)
    assert max(allowed(machine)) < SIZE
    assert machine.allowed().shape == (PADDED,)


def test_end_token_is_allowed_after_complete_output_and_required_at_its_maximum():
    machine = compiler().machine(Constraint("regex", "[ab]{1,2}"))
    assert END not in allowed(machine)
    take(machine, "a")
    assert END in allowed(machine)
    assert len(allowed(machine)) > 1
    assert not machine.finished
    take(machine, "b")
    assert machine.finished
    assert allowed(machine) <= {END}


def test_an_end_token_finishes():
    machine = compiler().machine(Constraint("regex", "[ab]{1,2}"))
    take(machine, "a")
    machine.take(END)
    assert machine.finished


def test_all_of_several_end_tokens_are_allowed():
    other = TOKENIZER.token_to_id("<think>")
    machine = compiler((END, other)).machine(Constraint("regex", "a{1,2}"))
    take(machine, "a")
    assert {END, other} <= allowed(machine)


def test_a_model_without_end_tokens_finishes_too():
    machine = compiler(()).machine(Constraint("regex", "a{1,2}"))
    take(machine, "a")
    assert END not in allowed(machine)
    take(machine, "a")
    assert machine.finished


def test_a_token_that_was_not_allowed_is_an_error():
    machine = compiler().machine(Constraint("regex", "a"))
    with pytest.raises(ConstraintError):
        machine.take(TOKENIZER.token_to_id("b"))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("json_schema", "{nope"), "key must be a string"),
        (Constraint("json_schema", '{"type": "nope"}'), "nope"),
        (Constraint("regex", "a("), "unclosed group"),
        (Constraint("lark", "start: foo"), "foo"),
        (Constraint("gbnf", "x"), "'gbnf' is not one of json_schema, lark, regex"),
        (schema({"allOf": [{"type": "integer"}, {"type": "string"}]}), "Unsatisfiable"),
        (schema({"$ref": "http://example.com/x.json"}), "does not fetch"),
        (Constraint("regex", "a" * (MAX_SOURCE + 1)), f"{MAX_SOURCE + 1:,} characters, at most {MAX_SOURCE:,}"),
    ],
)
def test_uncompilable_constraint_is_refused_with_the_compilers_message(constraint, message):
    with pytest.raises(ConstraintError, match=re.escape(message)):
        compiler().machine(constraint)


@pytest.mark.parametrize(
    "hostile",
    [
        Constraint("json_schema", '{"type":"object","properties":{"a":' * 5_000 + "{}" + "}}" * 5_000),
        Constraint("json_schema", '{"items":' * 25_000 + "{}" + "}" * 25_000),
        schema({"type": "object", "properties": {f"p{i}": {} for i in range(15_000)}}),
        schema({"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(8)]} for i in range(8)]}),
        Constraint("regex", "(" * 50_000 + "a" + "+)" * 50_000),
    ],
    ids=["deep", "deep items", "optional", "product", "groups"],
)
def test_hostile_sources_are_refused(hostile):
    with pytest.raises(ConstraintError):
        compiler().machine(hostile)


@pytest.mark.parametrize(
    "heavy",
    [
        schema({"enum": [f"value{i:06d}" for i in range(10_000)]}),
        schema({"type": "string", "maxLength": 10**9}),
        schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}),
        Constraint("regex", "a{1,1000000}"),
        Constraint("regex", "(a|b)*a(a|b){20}"),
    ],
    ids=["enum", "string", "array", "repeat", "automaton"],
)
def test_heavy_constraints_advance_within_their_limits(heavy):
    machine = compiler().machine(heavy)
    assert follow(machine, 100) == 100 or machine.finished


def test_automaton_too_large_for_a_step_raises():
    with pytest.raises(ConstraintError, match="too many"):
        follow(compiler().machine(Constraint("regex", "(a?){1000}a{1000}")), 1000)


def test_compiled_constraints_are_kept_up_to_a_number(monkeypatch):
    compiled = []
    make = ConstraintCompiler._compile
    monkeypatch.setattr(ConstraintCompiler, "_compile", lambda self, c: compiled.append(c) or make(self, c))
    every = compiler()
    sources = [Constraint("regex", f"a{{{i}}}") for i in range(1, MAX_CACHED + 2)]
    for constraint in (*sources[:-1], sources[0], sources[-1], sources[0], sources[1]):
        every.machine(constraint)
    assert compiled == [*sources, sources[1]]
    assert every._compiled.cache_info().currsize == MAX_CACHED


def test_machines_of_one_constraint_are_independent():
    every = compiler()
    first = every.machine(Constraint("regex", "ab"))
    take(first, "a")
    assert allowed(every.machine(Constraint("regex", "ab"))) != allowed(first)


def test_the_tokenizer_is_wrapped_once_for_threads_that_come_together(monkeypatch):
    made = []
    wrap = module.LLTokenizer
    monkeypatch.setattr(module, "LLTokenizer", lambda *args, **kwargs: made.append(1) or wrap(*args, **kwargs))
    every = compiler()
    threads = [
        threading.Thread(target=every.machine, args=(Constraint("regex", f"a{{{i}}}"),), daemon=True)
        for i in range(1, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_the_constraint_holds_against_bias_and_top_k():
    machine = compiler().machine(Constraint("regex", "b"))
    bias = ((TOKENIZER.token_to_id("a"), 100.0),)
    params = SamplingParams(top_k=1, logit_bias=bias)
    [choice] = sample(torch.zeros(1, PADDED), [Sampling(params, (), machine)])
    assert choice.token == TOKENIZER.token_to_id("b")


def test_a_row_whose_allowed_tokens_are_all_impossible_is_invalid():
    machine = compiler().machine(Constraint("regex", "b"))
    logits_V = torch.zeros(PADDED)
    logits_V[TOKENIZER.token_to_id("b")] = -torch.inf
    [error] = sample(logits_V[None], [Sampling(SamplingParams(), (), machine)])
    assert isinstance(error, InvalidLogits)


# -- in an engine -------------------------------------------------------------------------


def submit(rig: Rig, prompt: list[int], **params) -> tuple[list, threading.Event]:
    params = {"max_tokens": 120, "temperature": 1.0, "seed": 3} | params
    return begin(rig.engine, Generation(tuple(prompt), SamplingParams(**params)))


def ask(rig: Rig, prompt: list[int], **params) -> list:
    events, done = submit(rig, prompt, **params)
    assert done.wait(60)
    return events


def text_of(events: list) -> str:
    return "".join(e.text for e in events)


def test_constrained_outputs_always_validate_against_the_schema(make):
    with make(500) as rig:
        for seed in range(4):
            events = ask(rig, words(100, seed), seed=seed, constraint=schema(BOUNDED), ignore_eos=seed % 2 == 1)
            assert isinstance(events[-1], FinishedEvent)
            assert events[-1].finish_reason == "stop"
            jsonschema.validate(json.loads(text_of(events)), BOUNDED)


def test_a_seed_gives_the_same_constrained_answer_hit_or_not(make):
    def tokens(rig: Rig) -> list[int]:
        return [e.token for e in ask(rig, words(300, 1), constraint=schema(BOUNDED), frequency_penalty=0.5)[:-1]]

    with make(500) as rig:
        first, hit = tokens(rig), tokens(rig)
    with make(500, cache=False) as rig:
        cold = tokens(rig)
    assert first == hit == cold


def test_a_preempted_request_takes_no_token_twice(make):
    params = {"constraint": Constraint("regex", "[a-z]{200}"), "repetition_penalty": 1.3, "max_tokens": 260}

    def answers(pages: int) -> tuple[list[list[int]], int]:
        with make(pages) as rig:
            open_ = [submit(rig, words(150, i), seed=i, **params) for i in range(3)]
            for _, done in open_:
                assert done.wait(60)
            return [[e.token for e in events[:-1]] for events, _ in open_], rig.engine.scheduler.preemptions

    ample, none = answers(500)
    few = 2 * make.loaded.spec.checkpoint_pages + 12
    tight, some = answers(few)
    assert (none, some > 0) == (0, True)
    assert tight == ample


def test_a_constraint_that_cannot_be_compiled_is_refused_at_submit(make):
    with make(500) as rig:
        with pytest.raises(ConstraintError, match="unclosed"):
            ask(rig, words(10, 1), constraint=Constraint("regex", "a("))
        rig.settle()


def test_constraint_beyond_its_limits_fails_only_its_request(make):
    late = Constraint("regex", "x{20}(a?){1000}a{1000}")
    with make(500) as rig:
        beside, done = submit(rig, words(80, 2), constraint=Constraint("regex", "[a-z]{60}"))
        events = ask(rig, words(100, 1), constraint=late)
        assert done.wait(60)
        rig.settle()
        assert rig.engine.scheduler.cache.stats().leases == 0
    assert isinstance(events[-1], FailedEvent)
    assert isinstance(events[-1].error, ConstraintError)
    assert isinstance(beside[-1], FinishedEvent)


def test_constraint_past_its_time_limit_fails_the_answer_and_names_the_limit(make, monkeypatch):
    clock = itertools.count(step=0.25)  # each call of the library takes 0.25 s
    monkeypatch.setattr(module.time, "thread_time", lambda: next(clock))
    with make(500, constraint_time=1.0) as rig:
        *tokens, failed = ask(rig, words(4), constraint=Constraint("regex", "(a|b){50}", "guided_regex"))
        assert isinstance(failed.error, ConstraintError)
        message = "the constraint has taken 1.2 s to compute, at most 1 s are given to one answer (constraint_time)"
        assert str(failed.error).startswith(message)
        assert failed.error.param == "guided_regex"
        assert len(tokens) == 2
        assert isinstance(ask(rig, words(4), constraint=Constraint("regex", "a"))[-1], FinishedEvent)


def test_nan_in_one_requests_logits_fails_only_that_request(make, monkeypatch):
    def run(spoil: bool) -> list[list]:
        with make(500) as rig:
            forward = rig.engine.runner.run

            def spoiled(step):
                logits_RV = forward(step).clone()
                wanting = [item.seq for item in step.items if item.wants_token]
                for row, seq in enumerate(wanting):
                    if spoil and seq.n_prompt == 101 and seq.n_output == 5:
                        logits_RV[row, 1000] = torch.nan
                return logits_RV

            monkeypatch.setattr(rig.engine.runner, "run", spoiled)
            open_ = [submit(rig, words(100 + i, i), seed=i, max_tokens=12, ignore_eos=True) for i in range(3)]
            for _, done in open_:
                assert done.wait(60)
            rig.settle()
            rig.engine.scheduler.cache.check()
            assert rig.engine.scheduler.cache.stats().leases == 0
            return [events for events, _ in open_]

    undisturbed, spoiled = run(False), run(True)
    assert isinstance(spoiled[1][-1], FailedEvent)
    assert isinstance(spoiled[1][-1].error, InvalidLogits)
    assert len(spoiled[1]) == 6
    for i in (0, 2):
        assert [e.token for e in spoiled[i][:-1]] == [e.token for e in undisturbed[i][:-1]]
        assert isinstance(spoiled[i][-1], FinishedEvent)


def test_forced_tokens_are_allowed_and_end_at_a_choice():
    machine = compiler().machine(Constraint("regex", "the begin of it: (yes|no)"))
    forced = machine.forced()
    assert TOKENIZER.decode(forced) == "the begin of it: "[: len(TOKENIZER.decode(forced))]
    assert len(TOKENIZER.decode(forced)) >= len("the begin of it")  # the space may be part of the choice's tokens
    assert machine.allowed_length(forced) == len(forced)
    assert machine.allowed_length([*forced[:2], END, *forced[2:]]) == 2
    for token in forced:
        assert token in allowed(machine)
        machine.take(token)
    assert machine.allowed_length([]) == 0


def test_drafts_take_time_of_their_own_and_end_no_answer():
    machine = compiler().machine(schema(BOUNDED))
    machine._seconds, spent = 1.0, machine._spent
    machine.forced()
    machine.allowed_length([1, 2, 3])
    assert machine._spent == spent
    machine._spent_on_drafts = 2.0
    for question in (machine.forced, lambda: machine.allowed_length([1, 2])):
        with pytest.raises(ConstraintError, match="drafts have taken"):
            question()
    assert allowed(machine)


def test_a_question_that_breaks_the_library_leaves_the_constraint_as_it_is():
    machine = compiler().machine(schema(BOUNDED))
    before = allowed(machine)
    with pytest.raises(ConstraintError):
        machine._asked(lambda matcher: matcher.consume_token(END))
    assert allowed(machine) == before
