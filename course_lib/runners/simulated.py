"""SimulatedRunner: no model, only the time that it would take.

The scheduler, the block manager and the engine around it are the real ones. A step moves a virtual clock by what
a cost model says of the batch, so an hour of traffic on a data-centre GPU is replayed on a laptop in a minute.
"""

from __future__ import annotations

from ..batch import Batch, CountedBatch, Sample
from ..config import EngineConfig
from ..cost_model import RooflineCost
from ..hardware import Chip, ModelShape, find_chip, find_model, num_blocks_for


class SimulatedRunner:
    """Serves `model` on `chip` (presets by name, or objects of your own) in virtual time.

    cost: what `seconds(StepWork)` of a step is asked of; None: the roofline. A fitted one comes from `calibrate`.
    The tokens mean nothing, but are always the same: a function of the request's place in the order of arrival and
    of the position. There is no tokenizer and no end-of-sequence token: a request ends by its length.
    """

    tokenizer = None
    reads_tokens = False  # how many tokens there are is all that counts
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, model: ModelShape | str = "llama3-8b", chip: Chip | str = "h100", cost=None) -> None:
        self.model, self.chip = find_model(model), find_chip(chip)
        self.vocab_size, self.max_model_len = self.model.vocab_size, self.model.max_model_len
        self.cost = RooflineCost(self.model, self.chip) if cost is None else cost
        self.num_calls = 0
        self._time = 0.0
        self._samples = [Sample(token_id) for token_id in range(min(256, self.vocab_size))]  # made once, emitted often

    def blocks_that_fit(self, config: EngineConfig) -> int:
        """Blocks that the chip has memory for beside the weights: the pool for EngineConfig(num_blocks=None)."""
        return num_blocks_for(self.model, self.chip, config.block_size)

    def init_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """The engine's pool. Raises ValueError when the chip hasn't the memory for it."""
        most = num_blocks_for(self.model, self.chip, block_size)
        if num_blocks > most:
            raise ValueError(
                f"num_blocks={num_blocks} is more than fits beside the weights of {self.model.name} on "
                f"{self.chip.name}: at most {most} blocks of {block_size} tokens"
            )

    def execute(self, batch: CountedBatch | Batch) -> list[Sample]:
        """Let the time of this step pass."""
        self.num_calls += 1
        self._time += self.cost.seconds(batch.work)
        samples, count = self._samples, len(self._samples)
        return [samples[(7 * s.arrival + len(s.generated_token_ids)) % count] for s in batch.sampled]

    def now(self) -> float:
        """Virtual seconds since the runner was made."""
        return self._time

    def advance_to(self, time: float) -> None:
        """Let the clock jump forward, to the next arrival; a time that has passed changes nothing."""
        self._time = max(self._time, time)
