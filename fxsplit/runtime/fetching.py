"""When stages have their weights, with `Plan(offload=True)`: from their first instruction of a kind to the last.

          stage 0        stage 1        stage 2
play      [F0 F1 F2]     [F0 F1 F2]     ...
fetch   0              ─▶ 1            ─▶ 2           one stage ahead, in a thread of its own
leave                  0              1
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..compat import storage_key, tree_map
from ..replicas.offload import Offloaded
from ..schedules.tape import Instruction, Tape
from .device import Lanes


class Fetching:
    """The weights of the stages of one call.

    Args:
        stages: those whose parameters are on the CPU.
        lanes: told, before memory is given back, that a stage has read it.
    """

    def __init__(self, stages: Mapping[int, Offloaded], lanes: Lanes) -> None:
        self._stages, self._lanes = stages, lanes
        self._versions = {s: one.versions() for s, one in stages.items()}
        self._left: Counter[tuple[int, bool]] = Counter()
        self._using: Counter[int] = Counter()  # workers that play an instruction of a stage
        self._ended: set[int] = set()  # stages that have no more instructions of a kind, and weights still
        self._coming: dict[int, _Fetch] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def playing(self, tape: Tape) -> Iterator[None]:
        """A part of a call; afterwards nothing of it is on devices."""
        kinds = [(i.stage, i.kind == "forward") for i in tape.order if i.kind != "loss"]
        self._left = Counter(kind for kind in kinds if kind[0] in self._stages)
        self._using.clear()  # who failed in another part has not said that it ended
        self._ended.clear()
        try:
            yield
        finally:
            for stage, fetch in list(self._coming.items()):
                del self._coming[stage]
                self._give_back(stage, fetch)

    @contextlib.contextmanager
    def around(self, instruction: Instruction) -> Iterator[None]:
        """The stage of an instruction has its weights.

        Raises:
            GradientError: they are not what they were in the forward.
        """
        stage, forward = instruction.stage, instruction.kind == "forward"
        if stage not in self._stages or instruction.kind == "loss":
            yield
            return
        if not forward:
            self._stages[stage].check(self._versions[stage])
        with self._lock:
            self._using[stage] += 1
        self._fetch(stage).wait()
        ahead = self._next(stage, forward)
        if ahead is not None:
            self._fetch(ahead)
        yield
        with self._lock:
            self._left[stage, forward] -= 1
            self._using[stage] -= 1
            if not self._left[stage, forward]:
                self._ended.add(stage)
            # In a schedule of the user's, another worker may go the other way with the stage at this moment.
            done = stage in self._ended and not self._using[stage]
            fetch = self._coming.pop(stage, None) if done else None
            if done:
                self._ended.remove(stage)
        self._give_back(stage, fetch)

    def own(self, stage: int, result: Any) -> Any:
        """What a stage gives, without the memory of its weights, which will be gone: a view of one is copied."""
        if stage not in self._stages:
            return result
        memory = self._stages[stage].memory()

        def kept(leaf: Any) -> Any:
            is_one = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
            return leaf.clone() if is_one and storage_key(leaf) in memory else leaf

        return tree_map(kept, result)

    def _next(self, stage: int, forward: bool) -> int | None:
        """The stage that comes after, on the way forward or back, and is still to be played."""
        way = sorted(s for s in self._stages if (s > stage if forward else s < stage))
        found = way[0 if forward else -1] if way else None
        return found if found is not None and self._left[found, forward] else None

    def _fetch(self, stage: int) -> _Fetch:
        with self._lock:
            if stage not in self._coming:
                self._coming[stage] = _Fetch(self._stages[stage])
            return self._coming[stage]

    def _give_back(self, stage: int, fetch: _Fetch | None) -> None:
        """Nobody uses them any more, once they have come."""
        if fetch is not None and fetch.ended():
            if self._lanes.has_queues:
                self._lanes.uses(stage, 0, self._stages[stage].tensors())
            self._stages[stage].leave()


class _Fetch:
    """The weights of a stage on their way."""

    def __init__(self, offloaded: Offloaded) -> None:
        self._error: BaseException | None = None
        self._came = False
        self._thread = threading.Thread(
            target=self._run, args=(offloaded,), name="fxsplit fetch", daemon=True
        )
        self._thread.start()

    def _run(self, offloaded: Offloaded) -> None:
        try:
            offloaded.fetch()
            self._came = True
        except BaseException as error:
            self._error = error

    def ended(self) -> bool:
        """Whether they are there, once the copying has ended. Why not is forgotten: it would hold itself by its traceback."""
        self._thread.join()
        self._error = None
        return self._came

    def wait(self) -> None:
        """Until they are there.

        Raises:
            BaseException: what the copying raised: the device has no room, say.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
