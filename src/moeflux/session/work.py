"""A request inside the worker: its writer, the session that it runs on, and how it is told of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Timer

from moeflux.core.errors import DeadlineError, MoefluxError, OptionError
from moeflux.runtime.batch import check_tokens
from moeflux.runtime.job import F32, Job
from moeflux.runtime.prefill import PrefillProgress
from moeflux.sampling.params import MOST_BIAS
from moeflux.session.events import Failed, PromptTokens, Started, Token
from moeflux.session.generate import Clock, finished
from moeflux.session.handle import Handle, RequestOptions
from moeflux.session.model_text import ModelText
from moeflux.session.prompt import Conversation, prepare
from moeflux.session.rules import RuleSet
from moeflux.session.scoring import PromptScores
from moeflux.session.session import Marks, Session
from moeflux.session.tool_rules import rules_for
from moeflux.session.transcripts import Transcripts
from moeflux.session.writer import Request, Writer
from moeflux.store.stats import ExpertUse
from moeflux.text.regions import Splitter
from moeflux.text.stops import read_stops
from moeflux.text.tools import CallEnd, ToolCall

AnyPrompt = str | Sequence[int] | Conversation


@dataclass(eq=False)
class Work:
    """`run`: the prompt, and what a constraint forces behind it."""

    writer: Writer
    marks: Marks
    context: int  # tokens that its sequence can come to have
    marked: str | None  # the rendered prompt, where it is a conversation
    deadline: float | None
    run: tuple[int, ...]
    forced: tuple[Token, ...]
    clock: Clock
    scores: PromptScores | None = None  # where the prompt's own tokens are wanted
    handle: Handle = field(init=False)
    ids: list[int] = field(default_factory=list)  # of the answer
    session: Session | None = None
    job: Job | None = None
    before: ExpertUse = field(default_factory=ExpertUse)
    calls: list[ToolCall] = field(default_factory=list)  # that the answer made
    told: int = 0  # tokens of the prompt, in the latest progress
    cancelled: bool = False
    timer: Timer | None = None  # wakes the worker when it is late

    @property
    def prompt(self) -> PromptTokens:
        n = self.writer.usage.prompt
        return PromptTokens(self.run[:n], min(n, max(self.marks.boundaries, default=n)))

    @property
    def late(self) -> bool:
        return self.deadline is not None and self.deadline <= time.monotonic()

    @property
    def use(self) -> ExpertUse:
        """What it took of the expert store."""
        return ExpertUse() if self.session is None else self.session.sequence.use - self.before

    def started(self, session: Session, job: Job) -> None:
        self.told = session.use.read
        self.writer.read(self.told)
        self.job = job
        self.handle.tell(Started(self.told))
        self.tell_forced()

    def tell_forced(self) -> None:
        """What the constraint forces behind the prompt."""
        self._tell_tokens(self.forced)

    def take(self, logits: F32) -> tuple[int, ...]:
        """Of the scheduler: the tokens to run next."""
        if self.scores is not None and not self.clock.prefilled:
            self.handle.tell(self.scores.scored)
        self.clock.prefill()
        turn = self.writer.take(logits)
        self._tell_tokens(turn.events)
        return turn.run

    def _tell_tokens(self, tokens: tuple[Token, ...]) -> None:
        for token in tokens:
            self.ids.append(token.id)
            self.calls += [part.call for part in token.parts if isinstance(part, CallEnd)]
            self.clock.token()
            self.handle.tell(token)

    def tell_progress(self) -> None:
        """How far the prompt is, where it moved."""
        assert self.session is not None
        sequence, start = self.session.sequence, self.session.use.read
        if not self.clock.prefilled and len(sequence) > self.told:
            self.told = len(sequence)
            done, total = self.told - start, len(self.run) - start
            self.handle.tell(PrefillProgress(done, total, self.use.bytes_read, self.clock.elapsed))

    def let_go(self) -> None:
        """Of its state. It is over, and whoever still has its handle does not need it."""
        self.session, self.job, self.scores = None, None, None

    def end(self, error: MoefluxError | None) -> None:
        """Tells the last event. Without an error: its writer has ended, or it was cancelled, or it is late."""
        if error is None and self.writer.reason is None and self.late and not self.cancelled:
            error = DeadlineError("the time that the request had is over", where="option 'deadline_s'")
        if self.timer is not None:
            self.timer.cancel()
        if error is not None:
            self.handle.tell(Failed(error))
            return
        self.writer.cancel()
        if self.session is not None:
            self.writer.kept(self.session.use.created)
        self.handle.tell(finished(self.writer, self.clock, self.use))


def prepare_work(text: ModelText, context: int, prompt: AnyPrompt, options: RequestOptions, past: Transcripts) -> Work:
    """All that needs no engine: rendering, encoding, compiling. Raises what is the caller's mistake."""
    clock = Clock()
    clock.start()
    wanted = _wanted(text, prompt, options, past)
    ids = wanted.ids
    check_tokens(ids, text.vocab)
    scores = None if options.score is None else PromptScores(ids, options.score, text.n_ids)
    sampling = dict(options.sampling)
    if wanted.banned:
        sampling["logit_bias"] = {**sampling.get("logit_bias", {}), **dict.fromkeys(wanted.banned, -MOST_BIAS)}
    params, stops = text.sampling(**sampling), read_stops(options.stop)
    request = Request(ids, params, options.max_tokens, stops, rules=wanted.rules, splitter=wanted.splitter)
    writer = Writer(text, request, context)
    most = context if options.max_tokens is None else min(context, len(ids) + options.max_tokens)
    deadline = None if options.deadline_s is None else time.monotonic() + options.deadline_s
    turn = writer.begin()
    return Work(writer, wanted.marks, most, wanted.marked, deadline, turn.run, turn.events, clock, scores)


@dataclass(frozen=True)
class _Wanted:
    ids: list[int]
    marks: Marks
    rules: RuleSet
    marked: str | None = None
    splitter: Splitter | None = None
    banned: tuple[int, ...] = ()


def _wanted(text: ModelText, prompt: AnyPrompt, options: RequestOptions, past: Transcripts) -> _Wanted:
    breakpoints = dict.fromkeys(options.breakpoints, options.keep_s)
    if options.score is not None and (options.grammar is not None or isinstance(prompt, Conversation)):
        raise OptionError("a text is scored, without a constraint on its answer", where="option 'score'")
    if not isinstance(prompt, Conversation):
        ids = text.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return _Wanted(ids, Marks(breakpoints, (len(ids),), options.keep_s), RuleSet(options.grammar))
    chat, prepared = text.chat, prepare(text.chat, prompt, past)
    marks = Marks({**prepared.breakpoints, **breakpoints}, (*prepared.boundaries, prepared.said), options.keep_s)
    rules = rules_for(text, prompt, options)
    banned = chat.call_openers if prompt.choice.mode == "none" and prompt.callable else ()
    return _Wanted(prepared.ids, marks, rules, prepared.marked, prepared.splitter, banned)


def encode_prompt(text: ModelText, prompt: AnyPrompt, past: Transcripts) -> list[int]:
    if isinstance(prompt, Conversation):
        return prepare(text.chat, prompt, past).ids
    return text.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
