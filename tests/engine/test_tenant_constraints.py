"""Tenants beside the cache: what else one could notice of another. What is planned: tests/schedule/test_tenants.py."""

from headwater.engine.constraint import ConstraintCompiler
from headwater.request import Constraint
from tests.engine.test_detokenizer import byte_level


def test_a_constraint_that_another_tenant_sent_is_compiled_again(monkeypatch):
    """Compiling takes milliseconds to seconds: a hit across namespaces would be heard by the clock."""
    tokenizer = byte_level()
    compiler = ConstraintCompiler(tokenizer, tokenizer.get_vocab_size(), (0,))
    compiled, compile_one = [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda one: compiled.append(one) or compile_one(one))
    secret = Constraint("regex", "secret")
    for namespace in ("A", "A", "B", "B", ""):
        compiler.machine(secret, namespace)
    assert len(compiled) == 3  # one for each namespace
