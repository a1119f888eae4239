"""The Python interface: `moeflux.load(path)` gives an `Engine` that scores and generates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from moeflux.core.config import EngineConfig, Hints, Kv, Scales, TextUse
from moeflux.core.errors import MoefluxError
from moeflux.models.spec import ModelSpec
from moeflux.runtime import engine as runtime
from moeflux.runtime.experts import Progress
from moeflux.runtime.prefill import OnPrefill
from moeflux.sampling.constraint import Grammar
from moeflux.session.chat import Chat
from moeflux.session.demo import demo_model
from moeflux.session.generate import Generation, generate
from moeflux.session.model_text import ModelText
from moeflux.text.chat import Tools


class Engine(runtime.Engine):
    """An opened model. Close it, or use it in a `with` statement."""

    @cached_property
    def text(self) -> ModelText:
        """Tokenizer, chat template, ends and sampling defaults of the model."""
        return ModelText(self.config.model, self.spec, self.config.text)

    def _open_text(self, spec: ModelSpec) -> None:
        with suppress(MoefluxError):  # token ids need none of it; who asks for text is told then
            text = ModelText(self.config.model, spec, self.config.text)
            if text.has_tokenizer:
                _ = text.tokenizer
            self.text = text

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        progress: OnPrefill | None = None,
        **sampling: Any,
    ) -> Generation:
        """Stream the continuation of a text or of token ids; `finish` of what this returns then says how it ended.

        Sampled as the checkpoint's generation_config.json says, greedily if it says nothing; `sampling` changes that, with
        any of the fields of `SamplingParams`: temperature, top_k, top_p, min_p, penalties, logit_bias, seed, logprobs.
        `grammar` (`Grammar.schema(…)`, `.regex(…)`, `.lark(…)`) is what the output must fit.
        """
        return generate(
            self, self.text, prompt, max_tokens=max_tokens, stop=stop, grammar=grammar, progress=progress, **sampling
        )

    def chat(self, *, system: str | None = None, tools: Tools | None = None, thinking: bool | None = None) -> Chat:
        """Begin a conversation, by the checkpoint's own chat template."""
        return Chat(self, self.text, system=system, tools=tools, thinking=thinking)


def load(
    path: str | Path | None = None,
    *,
    backend: str = "auto",
    threads: int | None = None,
    ram: int | str | None = None,
    vram: int | str | None = None,
    context: int | None = None,
    isa: str = "auto",
    kv: Kv = "bf16",
    sequences: int = 1,
    prefixes: int | str = 0,
    hints: Hints = "both",
    policy: str = "lfru",
    reader: Literal["native", "python"] = "native",
    slots: int | None = None,
    scales: Scales = "auto",
    ring: int = 0,
    k: int | None = None,
    bits: int | None = None,
    text: TextUse = "all",
    checkpoints: int = 2,
    progress: Progress | None = None,
) -> Engine:
    """Open a model folder in place; without one, the demo model. Options that would do nothing are refused with the reason.

    `ram` ("8GiB") is the ceiling for the whole process, by default what is free; `context` the longest sequence that memory
    is kept for, 8192 tokens by default. `engine.plan` says what follows from them.
    Lossy, and only where asked for: `k`, fewer experts per token than the model's own; `bits`, experts requantised to so few
    whenever they are used, which is slow and there to measure what it costs (`moeflux eval`).
    `isa` forces an instruction set of the native backend; `progress(done, total)` is told about bytes of experts read.
    `kv`: keys and values are rounded to bf16 when they are computed; "f32" keeps them whole in twice the memory.
    `sequences` that run at the same time, each with so many `checkpoints` that it can go back to, and bytes for `prefixes`
    whose states are kept, are counted in the plan; more than was planned is refused, unless memory is left over.
    `text`: "all" keeps memory for the tokenizer and for constrained output, "plain" for the tokenizer, "none" for neither:
    what is not planned for is refused.

    The others never change a result: `hints` (how later layers' experts are foreseen), `policy` (which expert makes room),
    `reader`, `slots` (experts in memory at most, where that shall be fewer than the budget holds), `scales` (of all experts:
    "kept" in memory so that less is read, or "streamed"), `ring` (expert dispatches in flight, where a backend runs layer by
    layer: the native one does not, and refuses it).
    """
    folder = demo_model() if path is None else Path(path)
    options = (hints, policy, reader, slots, scales, ring, kv, sequences, prefixes, k, bits, text, checkpoints)
    return Engine(EngineConfig(folder, backend, threads, ram, vram, context, isa, *options), progress)
