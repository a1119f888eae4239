"""The rules of one answer: its grammar, the calls that it may or must make, how long it may think."""

from __future__ import annotations

import json
from collections.abc import Iterator

from moeflux.core.errors import InputError
from moeflux.core.log import log
from moeflux.sampling.constraint import Grammar
from moeflux.session.handle import RequestOptions
from moeflux.session.model_text import ModelText
from moeflux.session.prompt import Conversation
from moeflux.session.rules import CallRules, RuleSet, ThoughtRules
from moeflux.text.calls import CallGrammar
from moeflux.text.messages import read_tools
from moeflux.text.tools import Schemas, schemas_of

ANY_OBJECT = {"type": "object"}


def rules_for(text: ModelText, c: Conversation, options: RequestOptions) -> RuleSet:
    """Raises where the choice of tools cannot be met, or a grammar cannot be followed."""
    thoughts = _thoughts(text, c, options)
    schemas = c.choice.pick(schemas_of(read_tools(list(c.callable)))) if c.callable or c.choice.mode == "required" else {}
    if not schemas:
        return RuleSet(options.grammar, thoughts=thoughts)
    one = not c.choice.parallel
    if c.choice.mode == "required":
        if options.grammar is not None:
            raise InputError("an answer cannot both be a call and fit a grammar", where="tool_choice", hint="leave one out")
        return RuleSet(_grammar(text, schemas, forced=True, parallel=not one), True, one_call=one, thoughts=thoughts)
    opener = text.chat.call_grammars.opener
    grammar = None
    if opener is not None and text.tokenizer.is_byte_level:
        grammar = _grammar(text, schemas, forced=False, parallel=not one)
    calls = None if opener is None or grammar is None else CallRules(opener, grammar)
    return RuleSet(options.grammar, calls=calls, one_call=one, thoughts=thoughts)


def _grammar(text: ModelText, schemas: Schemas, *, forced: bool, parallel: bool) -> Grammar | None:
    """Where a schema of a tool is too much, its calls may have any arguments. None: even that is too much, and the model may
    write calls as it likes; where they are forced, that is an error."""
    grammars = text.chat.call_grammars
    make = grammars.forced if forced else grammars.opened
    for tools in _less_and_less(text, schemas):
        found = _as_grammar(make(tools, parallel))
        try:
            text.vocabulary.constrain(found)
        except InputError as error:
            refused = error
            continue
        if tools is not schemas and (names := [name for name in schemas if tools[name] is ANY_OBJECT]):
            log.warning("arguments of %d tools are not held to their schemas: %s", len(names), ", ".join(names[:5]))
        return found
    if forced:
        raise refused
    log.warning("calls of %d tools are not held to any grammar: %s", len(schemas), refused.what)
    return None


def _less_and_less(text: ModelText, schemas: Schemas) -> Iterator[Schemas]:
    yield schemas
    yield {name: schema if _can_be_followed(text, schema) else ANY_OBJECT for name, schema in schemas.items()}
    yield dict.fromkeys(schemas, ANY_OBJECT)


def _as_grammar(calls: CallGrammar) -> Grammar:
    return Grammar.lark(calls.lark, calls.schemas)


def _can_be_followed(text: ModelText, schema: object) -> bool:
    try:
        text.vocabulary.constrain(Grammar.schema(json.dumps(schema)))
    except InputError:
        return False
    return True


def _thoughts(text: ModelText, c: Conversation, options: RequestOptions) -> ThoughtRules:
    chat = text.chat
    if chat.thought_end is None:
        return ThoughtRules()
    asked = c.variables.get("enable_thinking") is True
    opener = chat.tokenizer.added.get(chat.syntax.markers["think"]) if asked else None
    return ThoughtRules(tuple(chat.thought_end), tuple(chat.thought_gap), opener, options.reasoning_budget)
