"""An opened model: checkpoint, trunk and backend, with sequences run through them. Owns everything it opened."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import finalize

import numpy as np
import numpy.typing as npt

from moeflux.backends.account import StateAccount
from moeflux.backends.state import BLOCK, LayerState
from moeflux.core.config import EngineConfig
from moeflux.core.errors import BudgetError, ClosedError, DeviceError, InputError, OptionError
from moeflux.core.log import log
from moeflux.core.units import format_bytes
from moeflux.formats.checkpoint import Checkpoint, read_config
from moeflux.models.registry import read_spec
from moeflux.models.spec import DeltaNet, ModelSpec
from moeflux.plan.needs import conversation_bytes
from moeflux.plan.sizes import measure
from moeflux.plan.text_size import RETURNED_BYTES
from moeflux.plan.views import check_trunk, skipped_note
from moeflux.runtime.batch import Batch, Segment, check_tokens
from moeflux.runtime.cancel import CancelFlag
from moeflux.runtime.experts import Progress
from moeflux.runtime.fingerprint import fingerprint
from moeflux.runtime.forward import Model, forward
from moeflux.runtime.gate import Gate
from moeflux.runtime.lossy import check_bits, fewer_experts, lossy_mark, lossy_notes
from moeflux.runtime.mflx import import_mflx
from moeflux.runtime.opening import choose, open_model, without_gpu
from moeflux.runtime.prefill import OnPrefill, run_prompt
from moeflux.runtime.saving import Identity, load_snapshot, save_snapshot
from moeflux.runtime.sequence import Sequence
from moeflux.runtime.trace import Trace
from moeflux.store.stats import StoreStats
from moeflux.store.trace import TraceRecorder

F32 = npt.NDArray[np.float32]


class Engine:
    """Two engines share nothing; one engine may hold many sequences.

    Any thread may call it: one forward runs at a time, and a second caller waits. A child of fork() must load its own.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self.config = config
        own = read_spec(read_config(config.model))
        spec = fewer_experts(own, config.k)
        self._checkpoint = Checkpoint(config.model, spec.names)
        try:
            views = check_trunk(spec, self._checkpoint)
            check_bits(config.bits, spec, self._checkpoint)
            self.sizes = measure(spec, self._checkpoint, views)
            choice = choose(config, spec, self.sizes, self._checkpoint)
            self.config, self.plan = choice.config, choice.plan
            self._open_text(spec)  # which takes more for a moment: before any weight is there
            try:
                self._model: Model | None = open_model(choice, spec, self._checkpoint, views, progress)
            except DeviceError as error:
                if config.backend != "auto":
                    raise
                choice = without_gpu(config, error, spec, self.sizes, self._checkpoint)
                self.config, self.plan = choice.config, choice.plan
                self._model = open_model(choice, spec, self._checkpoint, views, progress)
            config = choice.config
        except BaseException:
            self._checkpoint.close()
            raise
        self._gate = Gate()
        self._accounted = self.stats().use
        self.states = StateAccount(self.plan.state_limit if choice.backend.obeys_budget else None)
        own_k = own.moe_layers()[0][1].router.k
        said = (*choice.notes, *self.model.runner.notes)
        self.notes = (*said, *lossy_notes(config, own_k), *skipped_note(self._checkpoint), *self.plan.warnings)
        for note in self.notes:
            log.info("%s: %s", config.model, note)

    @property
    def model(self) -> Model:
        self._gate.check()
        if self._model is None:
            raise ClosedError("the engine is closed")
        return self._model

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def sequence(self) -> Sequence:
        """A new, empty sequence. BudgetError where there is no memory left for one."""
        return Sequence(self.spec, self.model.ops, self.config.kv, self.states)

    def state_bytes(self, n_tokens: int) -> int:
        """What one more conversation of so many tokens costs: its state, and the checkpoints that it may keep."""
        return conversation_bytes(self.sizes, n_tokens, self.config.kv, self.config.checkpoints)

    @property
    def state_room(self) -> int:
        """Bytes that are left for states. What checkpoints would give up is not counted."""
        return self.states.room

    def _open_text(self, spec: ModelSpec) -> None:
        """Called before weights are loaded. An engine for token ids has nothing to open."""

    @property
    def cuttable(self) -> bool:
        """Whether sequences can go back anywhere without a checkpoint."""
        return not any(isinstance(layer.mixer, DeltaNet) for layer in self.spec.layers)

    @cached_property
    def identity(self) -> Identity:
        """What the state of a sequence depends on besides its tokens, for files of states."""
        weights = fingerprint(self._checkpoint) + lossy_mark(self.config)
        ops = self.model.ops
        return Identity(self.spec.model_type, weights, self.config.kv, ops.name, ops.numerics)

    def new_states(self) -> tuple[LayerState, ...]:
        """Empty ones of every layer, for a snapshot to be read into."""
        return tuple(self.model.ops.new_state(layer.mixer, self.config.kv, self.states) for layer in self.spec.layers)

    def save(self, sequence: Sequence, path: Path, *, sampler: Any = None) -> int:
        """Tokens and state into a file that appears whole or not at all; `sampler`: JSON to be given back. Bytes written."""
        return save_snapshot(path, sequence.snapshot(), self.identity, sampler)

    def load(self, path: Path) -> tuple[Sequence, Any]:
        """A sequence from a file of this model, exactly as it was saved, and what was saved for its sampler."""
        snapshot, sampler = load_snapshot(path, self.new_states(), self.identity, self.spec.vocab, self.check_room)
        sequence = self.sequence()
        sequence.adopt(snapshot)
        return sequence, sampler

    def import_state(self, path: Path, tokens: Seq[int]) -> Sequence:
        """A sequence from an MFLX state (version 1 or 2) of these tokens, as close as two programs compute alike."""
        check_tokens(tokens, self.spec.vocab)
        sequence = self.sequence()
        sequence.adopt(import_mflx(path, tokens, self.spec, sequence.states))
        return sequence

    def forward(self, *segments: Segment, cancel: CancelFlag | None = None) -> list[F32 | None]:
        """Run a batch. Per segment: the logits that it wants.

        `cancel` may be set by any thread and is heard within a layer: CancelledError, and the sequences must be restored, as
        after any failure. Where another thread closes the engine meanwhile, ClosedError.
        """

        def work() -> list[F32 | None]:
            for segment in segments:
                self.check_room(len(segment.sequence) + len(segment.tokens))
            self._check_memory(segments)
            try:
                return forward(self.model, Batch(segments), cancel)
            finally:
                self._account(segments)

        return self._gate.run(work)

    def _account(self, segments: Seq[Segment]) -> None:
        """What the store did since the last forward is this one's, and its sequences' in proportion to their tokens."""
        if self._model is not None and (weights := [len(segment.tokens) for segment in segments]) and sum(weights):
            now = self.stats().use
            for segment, share in zip(segments, (now - self._accounted).split(weights), strict=True):
                segment.sequence.use += share
            self._accounted = now

    def prefill(
        self,
        sequence: Sequence,
        tokens: Seq[int],
        progress: OnPrefill | None = None,
        cancel: CancelFlag | None = None,
    ) -> F32:
        """Run a prompt of any length in chunks of the plan's size. Logits [vocab] after the last token.

        Where it fails, or `cancel` ends it between two layers (CancelledError), the sequence keeps the whole chunks.
        """
        check_tokens(tokens, self.spec.vocab)
        self.check_room(len(sequence) + len(tokens))
        return run_prompt(self, sequence, tokens, progress, cancel)

    def stats(self) -> StoreStats:
        """What the expert store has done so far."""
        return self.model.experts.store.stats()

    def score(self, ids: Seq[int] | npt.NDArray[np.integer], *, trace: Trace | None = None) -> F32:
        """Logits [T, vocab] of every position, for a sequence of its own."""
        tokens = list(ids)
        check_tokens(tokens, self.spec.vocab)
        sequence = self.sequence()
        logits = self._returned(len(tokens))
        for start in range(0, len(tokens), self.plan.chunk_tokens):

            def take(at: int, rows: F32, start: int = start) -> None:
                logits[start + at : start + at + len(rows)] = rows

            chunk = tokens[start : start + self.plan.chunk_tokens]
            self.forward(Segment(sequence, chunk, "all", trace, take=take))
        return logits

    def check_room(self, n_tokens: int) -> None:
        """Whether a sequence may become so long."""
        if n_tokens > self.plan.context:
            raise InputError(
                f"a sequence of {n_tokens} tokens, but the memory of this engine is planned for {self.plan.context}",
                where="option 'context'",
                hint=f"load the model with context={n_tokens} or more",
            )

    def _check_memory(self, segments: Seq[Segment]) -> None:
        """Whether a forward stays within what was planned. Before it begins, so that no sequence is left half way."""
        if self.states.limit is None:
            return
        n, most = sum(len(segment.tokens) for segment in segments), self.plan.chunk_tokens
        if n > most:
            hint = "prefill cuts a prompt by itself; a larger budget (ram=) gives larger chunks"
            raise InputError(f"{n} tokens in one forward, but memory is planned for {most}", where="forward", hint=hint)
        rows = sum(segment.n_returned for segment in segments)
        if rows > self.plan.logit_rows:
            hint = "take logits a few rows at a time (Segment.take), or load the model with more sequences="
            what = f"{rows} rows of logits at once, but memory is planned for {self.plan.logit_rows}"
            raise InputError(what, where="forward", hint=hint)
        blocks = sum(len(segment.tokens) // BLOCK + 2 for segment in segments)
        if blocks * BLOCK * self.sizes.kept_per_token(self.config.kv) > self.states.room:  # at most; else it is added up
            self.states.make_room(sum(segment.sequence.growth_bytes(len(segment.tokens)) for segment in segments))

    def _returned(self, n_rows: int) -> F32:
        """Memory for logits that are handed out: beyond what is planned for them, it is counted for as long as it lives."""
        n_bytes = 4 * n_rows * self.spec.vocab
        try:
            charge = self.states.take(max(0, n_bytes - RETURNED_BYTES))
        except BudgetError as error:
            what = f"the logits of {n_rows} tokens are {format_bytes(n_bytes)}, and the budget does not hold them"
            hint = "score fewer tokens at a time, or take logits a few rows at a time (Segment.take)"
            raise BudgetError(what, where="score", hint=hint) from error
        logits = np.empty((n_rows, self.spec.vocab), dtype=np.float32)
        finalize(logits, charge.end)
        return logits

    def record_routing(self) -> TraceRecorder:
        """From now on, which experts every token chooses. `save` it at the end; `moeflux bench replay` judges it."""
        (n_experts, k), *others = {(moe.router.n_experts, moe.router.k) for _, moe in self.spec.moe_layers()}
        if others:
            raise OptionError("layers with different numbers of experts have no trace", where=str(self.config.model))
        recorder = TraceRecorder(self.config.model.name, [layer for layer, _ in self.spec.moe_layers()], n_experts, k)
        self._gate.run(lambda: self.model.experts.tell(recorder))
        return recorder

    def close(self) -> None:
        """Lets every file and weight go. Closing twice is fine.

        A forward of another thread hears it within a layer and ends with ClosedError, which is waited for. In a child of
        fork() nothing is waited for: the threads are the parent's.
        """
        model = self._model
        if model is None or not self._gate.here:
            self._model = None
            self._checkpoint.close()
            return

        def let_go() -> None:
            model.runner.close()
            self._model = None
            self._checkpoint.close()

        self._gate.close(model.experts.close, let_go)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
