"""One running reply: its choices, merged in the order in which their tokens come."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from router.choice import Choice, Delta, SpeculationTally
from router.logprobs import PromptEntries
from router.path_policy import PathDecision
from router.plan import GenerationPlan
from router.served_model import ServedModel

MUCH_PROMPT_TOKENS = 512
"""Log probabilities of so many are written in milliseconds."""


class Reply:
    """What is being generated for one client request."""

    def __init__(
        self, model: ServedModel, plan: GenerationPlan, decision: PathDecision, started: float
    ) -> None:
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.card = model.card
        self.tokenizer = model.tokenizer
        self.plan = plan
        self.decision = decision
        self.started = started
        """On the service's clock."""
        self.choices: list[Choice] = []

    @property
    def num_prompt_tokens(self) -> int:
        return self.plan.num_prompt_tokens

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens that no choice had to compute, as far as the choices have begun."""
        num_choices = self.plan.num_choices
        cached = [choice.num_cached_prompt_tokens for choice in self.choices]
        return sum(
            min(cached[first : first + num_choices]) for first in range(0, len(cached), num_choices)
        )

    @property
    def num_completion_tokens(self) -> int:
        """Tokens delivered so far."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Of these, tokens of reasoning."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def num_predicted_tokens(self) -> int:
        """Tokens of the client's prediction that appeared in the completions."""
        return sum(choice.num_predicted_tokens for choice in self.choices)

    @property
    def num_unused_prediction_tokens(self) -> int:
        """Tokens of the client's prediction that did not, as far as the choices have come."""
        prompts, num_choices = self.plan.prompts, self.plan.num_choices
        return sum(
            max(0, len(prompts[c.index // num_choices].prediction_ids) - c.num_predicted_tokens)
            for c in self.choices
        )

    def tally(self) -> SpeculationTally:
        """What speculation did so far, over all choices."""
        total = SpeculationTally()
        for choice in self.choices:
            total.add(choice.tally)
        return total

    def echo(self, index: int) -> str:
        """Text that goes before a choice's own."""
        return self.plan.prompts[index // self.plan.num_choices].echo

    def prompt_entries(self, index: int) -> PromptEntries:
        """The prompt's tokens with their log probabilities, if the client asked for them. To be
        called once the choice has begun."""
        if self.plan.num_prompt_logprobs is None:
            return ()
        token_ids = self.plan.prompts[index // self.plan.num_choices].token_ids
        told = self.choices[index].generation.prompt_logprobs
        return tuple(zip(token_ids, (None, *told), strict=True))

    @property
    def tells_much(self) -> bool:
        """Writing it takes so long that others would notice."""
        tells_prompt = self.plan.num_prompt_logprobs is not None
        return tells_prompt and self.num_prompt_tokens > MUCH_PROMPT_TOKENS

    def set_decision(self, decision: PathDecision) -> None:
        """Take another path from the next step on."""
        self.decision = decision
        for choice in self.choices:
            choice.generation.set_path(decision.path)

    def close(self) -> None:
        """Cancel what still runs. Idempotent."""
        for choice in self.choices:
            choice.generation.close()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Every delta of every choice. The first error of any ends them all."""
        if len(self.choices) == 1:
            async with aclosing(self.choices[0].deltas()) as deltas:
                async for delta in deltas:
                    yield delta
            return
        merged: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        tasks = [asyncio.create_task(_pump(choice, merged)) for choice in self.choices]
        try:
            num_running = len(tasks)
            while num_running:
                item = await merged.get()
                if isinstance(item, BaseException):
                    raise item
                num_running -= item.finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(choice: Choice, merged: asyncio.Queue[Delta | BaseException]) -> None:
    try:
        async with aclosing(choice.deltas()) as deltas:
            async for delta in deltas:
                merged.put_nowait(delta)
    except Exception as error:  # noqa: BLE001 - raised again by the reader
        merged.put_nowait(error)
