"""The CUDA runner: a decoding step goes whole to the graph of `decode.py`, prompts and traces through the composed blocks.

Sequences that decode together go through the graph one after another. Both ways give the same bits, so who runs what is a
matter of speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from moeflux.backends.base import F32, Batch, Cancel, DeviceTier, OpenModel, Tiers
from moeflux.backends.composed import ComposedRunner, Routing, finite
from moeflux.backends.cuda.decode import Decoder
from moeflux.backends.cuda.device import device_errors
from moeflux.backends.cuda.memory import Tensor
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.phases import DecodeOptions
from moeflux.backends.cuda.pool import ExpertPool, pool_shape
from moeflux.backends.cuda.prompt import PromptStep
from moeflux.backends.cuda.records import RecordedExperts
from moeflux.backends.cuda.resident import expert_refusal, fill_pool, open_decoder, step_refusal
from moeflux.backends.cuda.tier import PoolMemory
from moeflux.backends.ops import LayerWeights, Record, Span
from moeflux.core.errors import NumericError
from moeflux.models.spec import DeltaNet


class CudaRunner(ComposedRunner):
    def __init__(self, ops: CudaOps, model: OpenModel, tiers: Tiers) -> None:
        super().__init__(ops, model)
        self._cuda, self._tiers = ops, tiers
        self._pool: ExpertPool | None = None  # with every expert
        self._records: RecordedExperts | None = None  # with some, and where the others are
        self._slots: ExpertPool | None = None  # for some, filled layer by layer from below
        self._tier: DeviceTier | None = None
        self._decoder: Decoder | None = None
        mixers = [layer.mixer for layer in model.spec.layers]
        self._attending = next((i for i, mixer in enumerate(mixers) if not isinstance(mixer, DeltaNet)), 0)
        self._refusal = self._open()

    def _open(self) -> str | None:
        """Why there is no decode step, or None."""
        trunk, experts, tiers = self.model.trunk, self.model.experts, self._tiers
        if experts.native is None:
            return "experts are requantised whenever they are used"
        if reason := step_refusal(trunk) or expert_refusal(trunk, experts):
            return reason
        n_experts = sum(moe.router.n_experts for _, moe in self.model.spec.moe_layers())
        if tiers.device_slots >= n_experts:
            pool = self._pool = fill_pool(self._cuda, trunk, experts, tiers.progress)
        elif tiers.host_records:
            per_layer = tiers.device_slots // len(trunk.layers)
            self._records = RecordedExperts(self._cuda, trunk, experts, per_layer, tiers.staged_slots, tiers.progress)
            pool = self._records.pool
        else:
            if n_slots := tiers.device_slots + tiers.staged_slots:
                shape, count = pool_shape(trunk), n_experts // len(trunk.layers)
                self._slots = ExpertPool(self._cuda.device, shape, n_slots, len(trunk.layers), count)
                self._tier = experts.open_tier(PoolMemory(self._slots))
            return "host memory does not hold the experts that device memory lacks"
        options = DecodeOptions(tiers.context, self.model.spec.norm_eps)
        self._decoder = open_decoder(self._cuda, trunk, experts, options, pool)
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self._refusal is None else (f"tokens are decoded block by block, which is slow: {self._refusal}",)

    @property
    def decoder(self) -> Decoder | None:
        """None where this model has no decode step."""
        return self._decoder

    def run(self, batch: Batch, cancel: Cancel | None = None) -> F32 | None:
        if self._decoder is not None:
            plain = self._is_plain(batch)
            if plain and len(batch.tokens()) == len(batch.states()) and not self._hands_out(batch):
                with device_errors(self._cuda.device, "a decoding step"):
                    return self._step(self._decoder, batch, cancel)
            self._decoder.forget()
            if plain and self._pool is not None and (prompt := self._decoder.prompt) is not None:
                with device_errors(self._cuda.device, "a prompt's chunk"):
                    return self._prompt(prompt, batch, cancel)
        self._cuda.defer_checks = self._pool is not None  # so that the host need not wait in every layer
        with device_errors(self._cuda.device, "a prompt's chunk"):
            logits = super().run(batch, cancel)
            self._cuda.check()
        return logits

    def _is_plain(self, batch: Batch) -> bool:
        """Nobody wants to know more than logits; keys and values are kept in bf16."""
        return (
            batch.recorder(self.ops.to_numpy) is None
            and not self.model.experts.recording
            and all(rows.storage.dtype == "BF16" for rows in batch.states()[0][self._attending].rows.values())
        )

    def _hands_out(self, batch: Batch) -> bool:
        return next(batch.handed_rows(self.model.spec.vocab), None) is not None

    def _prompt(self, prompt: PromptStep, batch: Batch, cancel: Cancel | None) -> F32 | None:
        """Sequence by sequence through all layers."""
        tokens, parts = batch.tokens(), []
        for span, states in zip(batch.spans(0), batch.states(), strict=True):
            if cancel:
                cancel.check()
            parts.append(prompt.run(tokens[span.rows], states, span.position))
        logits = self.logits(batch, self.ops.join(parts, axis=0))
        prompt.check()
        return logits

    def _step(self, decoder: Decoder, batch: Batch, cancel: Cancel | None) -> F32 | None:
        """The sequences one after another. Logits come to memory that is the caller's own."""
        tokens, states, wanted = batch.tokens(), batch.states(), batch.wanted_rows()
        found = torch.empty(len(wanted), self.model.spec.vocab, pin_memory=self._cuda.device.name != "cpu")
        for i, span in enumerate(batch.spans(0)):
            if cancel:
                cancel.check()
            logits = decoder.step(states[i], span.position, tokens[i])
            if i in wanted:
                found[wanted.index(i)].copy_(logits, non_blocking=True)
            self._wait()
        return finite(found.numpy()) if wanted else None

    def _wait(self) -> None:
        if self._cuda.device.name != "cpu":
            torch.cuda.current_stream().synchronize()

    def discard(self) -> None:
        super().discard()
        with suppress(NumericError):
            self._cuda.check()
        if self._decoder is not None:
            self._decoder.forget()

    # Prompts.

    def feed(
        self,
        index: int,
        layer: LayerWeights,
        rows: tuple[Tensor, Tensor],
        routing: Routing,
        spans: Sequence[Span],
        note: Record | None,
        cancel: Cancel | None,
    ) -> Any:
        if self._pool is None and self._records is None and self._tier is None:
            return super().feed(index, layer, rows, routing, spans, note, cancel)
        ids, weights = (self._cuda.tensor(part) for part in routing)
        if self.model.experts.recording:
            self.model.experts.record(index, self.ops.to_numpy(ids))
        x, h = rows
        if self._pool is not None:
            y = self._cuda.pooled_experts(h, ids, weights, self._pool, index)
        elif self._records is not None:
            y = self._records.run(h, ids, weights, index)
        else:
            assert self._tier is not None
            assert self._slots is not None
            sweep = not any(span.decodes for span in spans)
            rounds = self._tier.rounds(index, self.ops.to_numpy(ids).reshape(-1).tolist(), sweep=sweep, cancel=cancel)
            y = self._cuda.experts_in_rounds(h, ids, weights, self._slots, index, rounds)
        return self.ops.add_experts(layer, x, h, y, note)

    def close(self) -> None:
        super().close()
        self._decoder = self._pool = self._records = self._slots = self._tier = None
