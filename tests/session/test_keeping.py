"""What a worker keeps of prompts, and what it says of it: the same words as without, and figures that are true."""

from __future__ import annotations

import pytest

import moeflux
from moeflux.session.events import Queued
from moeflux.session.handle import RequestOptions
from moeflux.session.prefixes import PrefixStore
from moeflux.session.prompt import Conversation, prepare
from moeflux.session.transcripts import Transcripts
from moeflux.session.worker import Worker, WorkerOptions
from session.models import chat_model

SYSTEM = {"role": "system", "content": "The quick brown fox jumps over the lazy dog. " * 12}
TOOL = {"name": "look", "description": "looks", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Its states cannot be cut: they are where they were kept, and nowhere else."""
    folder = chat_model(tmp_path_factory.mktemp("models") / "model", "xml")
    with moeflux.load(folder, context=2048, sequences=2, prefixes="64MB") as engine:
        yield engine


def asked(*contents, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return Conversation([SYSTEM, *messages], [TOOL], {"enable_thinking": False}, **more)


def letters(engine):
    """A bias towards tokens of one letter, which is not how the tokenizer itself would cut a text."""
    return {id: 60.0 for id in range(engine.text.n_ids) if engine.text.tokenizer.piece(id) in (b"q", b"u", b"i", b"c", b"k")}


def answer(worker, conversation, n=6, **more):
    handle = worker.submit(conversation, RequestOptions(max_tokens=n, **more))
    ids, prompt = [], None
    for event in handle.events():
        if isinstance(event, Queued):
            prompt = event.prompt
        ids += [event.id] if hasattr(event, "parts") and hasattr(event, "id") else []
    return ids, prompt, handle.result().usage


def alone(engine, conversation, n=6):
    ids = prepare(engine.text.chat, conversation, Transcripts()).ids
    return [token.id for token in engine.generate(ids, max_tokens=n)]


def test_what_conversations_have_in_common_is_run_once(engine):
    """Without any mark: tools and the system's part, and nothing of the question."""
    with Worker(engine, engine.text, PrefixStore(engine), WorkerOptions(parallel=1)) as worker:
        first, prompt, usage = answer(worker, asked("hello"))
        assert (usage.cached, usage.prompt) == (0, len(prompt.ids))
        assert 0 < usage.kept <= prompt.said
        for words in ("other words", "a third one"):
            ids, prompt, usage = answer(worker, asked(words))
            shared = engine.text.tokenizer.decode(prompt.ids[: usage.cached])
            assert shared.endswith("<|im_start|>user\n")
            assert ids == alone(engine, asked(words))
        again, _, usage = answer(worker, asked("hello"))
        assert again == first == alone(engine, asked("hello"))
        assert usage.cached + usage.kept <= usage.prompt


def test_marks_are_places_to_start_from(engine):
    parts = [{"type": "text", "text": "A long beginning. " * 6, "keep_s": 300}, {"type": "text", "text": "One?"}]
    with Worker(engine, engine.text, PrefixStore(engine), WorkerOptions(parallel=1)) as worker:
        for words in ("One?", "Two?"):
            conversation = asked([parts[0], {"type": "text", "text": words}])
            ids, prompt, usage = answer(worker, conversation)
            assert ids == alone(engine, conversation)
        assert engine.text.tokenizer.decode(prompt.ids[: usage.cached]).endswith("A long beginning.")


def test_a_restart_loses_nothing(tmp_path):
    """Also where the model cut its text in another way than the tokenizer would."""
    with moeflux.load(chat_model(tmp_path / "model", "chatml"), context=2048, prefixes="64MB") as engine:
        words = ["hello"]
        held = 0  # tokens of prompt and answer, but for the last, which was not run
        for _ in range(3):
            store = PrefixStore(engine, None, tmp_path)
            with Worker(engine, engine.text, store) as worker:
                ids, prompt, usage = answer(worker, asked(*words), 12, sampling={"logit_bias": letters(engine)})
            store.flush()
            store.close()
            said = engine.text.tokenizer.decode(ids)
            assert engine.text.tokenizer.encode_plain(said) != ids
            assert usage.cached == held
            held = len(prompt.ids) + len(ids) - 1
            words += [said, "and then?"]


def test_a_prompt_that_is_only_run(engine):
    with Worker(engine, engine.text, PrefixStore(engine), WorkerOptions(parallel=1)) as worker:
        ids, _, usage = answer(worker, asked("warm"), 0)
        assert (ids, usage.completion) == ([], 0)
        ids, prompt, usage = answer(worker, asked("warm"))
        assert usage.cached == prompt.said
        assert ids == alone(engine, asked("warm"))
