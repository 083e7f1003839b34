"""`RankPipeline`: the part of a pipeline that one rank has, with the face that it has in one process."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..batch.merge import split_gradients
from ..compat import TreeSpec, not_traced, parameter_hooks_silenced, tree_unflatten
from ..errors import ArgumentError, FxsplitError, RankError
from ..graph.ir import Stage
from ..loss.check import check_differentiable
from ..loss.inside import LossInside
from ..loss.losses import beside, check_loss, check_loss_fn
from ..loss.reductions import LossFn
from ..pipeline import Pipeline
from ..proof.structure import verify_structure
from ..runtime import play
from ..runtime.engine import Batch, Engine
from ..runtime.guarded import Guarded, buffers_as_before
from ..runtime.reentry import computing_for
from ..weights.fill import Loaded, fill
from ..weights.sources import source_of
from .channel import Channel, channel_of
from .gradients import Averages, chains, handed_on
from .hub import RankHub, ranks_of_stages
from .packets import Item
from .sharding import is_sharded, local
from .watch import watch_of_process


class RankPipeline(Pipeline):
    """What `fxsplit.distributed.compile` returns. Children are the model's own; tensors are those of this rank's stages.

    Attributes:
        mesh: the ranks.
        own: the stages of this rank.
    """

    mesh: DeviceMesh
    own: tuple[Stage, ...]

    @classmethod
    def of(cls, pipe: Pipeline, mesh: DeviceMesh, device: torch.device) -> RankPipeline:
        """This rank's part of a pipeline that has no weights yet."""
        made = cls(pipe.model, pipe.plan, pipe.compiled, [])
        made.__dict__["_example"] = pipe.__dict__["_example"]
        own = made.__dict__
        own.update(mesh=mesh, _watch=watch_of_process(), _hubs={})
        group = mesh.get_group("pp")
        own["_channel"] = channel_of(group, device)
        for engine in made.engines():
            count = engine.compiled.dims.batch_size(made.example) or 1
            tape = engine.crew.tape_for(min(count, made.plan.micro_batches), {})
            hub = RankHub(made._channel, made._watch, ranks_of_stages(tape, group.size()))
            made._hubs[id(engine)] = hub
            engine.watch.look_at([s for s in engine.compiled.stages if hub.has(s.index)])
        own["own"] = tuple(s for s in made.stages if made._hub.has(s.index))
        own["_reduces"] = (
            mesh.get_group("dp") if "dp" in (mesh.mesh_dim_names or ()) and mesh["dp"].size() > 1 else None
        )
        return made

    _watch: Any
    _channel: Channel
    _hubs: dict[int, RankHub]
    _reduces: Any

    @property
    def _hub(self) -> RankHub:
        return self._hub_of(self._now)

    def _hub_of(self, engine: Engine) -> RankHub:
        hub = self._hubs[id(engine)]
        engine.common.hub = hub
        return hub

    @property
    def rank_of(self) -> tuple[int, ...]:
        """Stage → its rank in the pipeline."""
        return tuple(self._hub.rank_of)

    # -- running -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the whole batch, on every rank, without a graph: backward is `step`'s.

        Raises:
            ArgumentError: somebody wants its gradient; and as a call in one process.
        """
        if torch.is_grad_enabled() and self.model.training:
            raise ArgumentError(
                "a pipeline over ranks goes backward in pipe.step, which has the loss inside",
                remedy="pipe.step(x, target=y, loss_fn=...); or torch.no_grad() around pipe(x)",
            )
        now = self._now
        batch = self._batch(now, args, kwargs)
        with torch.no_grad(), self._told(), now.common.lock, buffers_as_before(self._written(now)):
            call, runner = self._called(now, batch, grad=False)
            rows = play.forward(call)
            self._commit(runner)
            flat = runner.merged(rows) if rows else None
            return self._shared(flat, now.compiled.traced.out_spec)

    def _shared(self, flat: list[Any] | None, spec: TreeSpec) -> Any:
        """Outputs, from who has them to all."""
        if flat is not None:
            flat = [v.detach() if isinstance(v, torch.Tensor) else v for v in flat[: spec.num_leaves]]
        return tree_unflatten(self._from_last(flat), spec)

    def _from_last(self, values: list[Any] | None) -> list[Any]:
        hub, channel = self._hub, self._channel
        if channel.rank == hub.last:
            assert values is not None
            items: list[Item] = [(str(k), 0, None, v) for k, v in enumerate(values)]
            for target in range(channel.size):
                if target != channel.rank:
                    channel.send(target, ("shared",), hub.digest, items)
            return values
        channel.expect(hub.last, [("shared",)], hub.digest)
        return [value for _, _, _, value in channel.receive(hub.last)]

    def _batch(self, now: Engine, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """The arguments of a call: where they are wrong, nothing has gone to other ranks."""
        self._watch.check()
        try:
            return now.batch(args, kwargs)
        except FxsplitError as error:
            self._watch.refused(error)
            raise

    def _called(self, now: Engine, batch: Batch, *, grad: bool) -> tuple[Any, Guarded]:
        self._hub_of(now)
        now.watch.use_current_modules()
        own = {name: p for name, p in now.watch.trainable().items() if not is_sharded(p)}
        call = now._call(batch.chunks, own, grad=grad)
        return call, Guarded(now.common.lock, (), call, now.compiled, batch.rows)

    def _commit(self, runner: Guarded) -> None:
        if runner.call.norms is not None:
            runner.call.norms.commit()

    def _written(self, now: Engine) -> Any:
        now.watch.use_current_modules()
        return now.watch.written()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """If this rank fails, the others hear of it; if another has, this one raises what that one has said."""
        self._watch.check()
        try:
            yield
        except BaseException as error:
            self._watch.failed(error)
            raise
        finally:
            self._watch.computes("")

    @not_traced
    def _step(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss_fn: LossFn,
        target: Any,
        reduction: str | None,
        *,
        output: bool,
    ) -> tuple[torch.Tensor, Any]:
        check_loss_fn(loss_fn, reduction)
        now = self._now
        batch = self._batch(now, args, kwargs)
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._told())
            entered.enter_context(torch.enable_grad())
            entered.enter_context(now.common.lock)
            entered.enter_context(buffers_as_before(self._written(now)))
            self._follow_first_replica(now)
            call, runner = self._called(now, batch, grad=True)
            averages = None if self._reduces is None else Averages(self._reduces, self._channel)
            self._hub.averages = averages
            inside = now.loss_inside and len(batch.rows) > 1
            play_it = self._loss_inside if inside else self._loss_outside
            loss, flat, gradients, others = play_it(now, runner, batch, loss_fn, target, reduction)
            self._commit(runner)
            first = len(batch.inputs)
            found = dict(zip(call.parameters, gradients[first:], strict=True))
            handed_on(self._channel, self._hub.rank_of, self._hub.digest, now.compiled.stages, found)
            shared = self._from_last(
                None if loss is None else [loss.detach(), *(flat if output and flat else [])]
            )
            if averages is not None:
                shared[0] = averages.end(shared[0], call.parameters, found)
            leaves = [*batch.inputs, *call.parameters.values()]
            _add(leaves, [*gradients[:first], *found.values()], others)
        whole = tree_unflatten(shared[1:], now.compiled.traced.out_spec) if output else None
        return shared[0], whole

    def _loss_inside(
        self, now: Engine, runner: Guarded, batch: Batch, loss_fn: LossFn, target: Any, reduction: str | None
    ) -> Any:
        call, compiled = runner.call, now.compiled
        if not self._hub.has(len(compiled.stages) - 1):
            call.begin_sums()
            with parameter_hooks_silenced(list(call.parameters.values())):
                play.silently(call)
            return None, None, runner._gradients(), []
        parts = now._in_parts(loss_fn, target, batch.rows, reduction)
        around = functools.partial(computing_for, now.common.lock)
        spec = compiled.traced.out_spec
        loss = LossInside(parts, compiled.program.outputs, spec, around, call.seed)
        check = now.common.said.check_of(loss, compiled.merges, target)
        play.step(call, loss)
        with torch.autograd.set_multithreading_enabled(False):
            check()
        runner.check_rows(loss.rows())
        flat = runner.merged(loss.rows())[: spec.num_leaves]
        return loss.total(), flat, runner._gradients(), loss.sums()

    def _loss_outside(
        self, now: Engine, runner: Guarded, batch: Batch, loss_fn: LossFn, target: Any, reduction: str | None
    ) -> Any:
        """All forwards, the loss of the merged output, all backwards: as in one process."""
        call, merges, spec = runner.call, now.compiled.merges, now.compiled.traced.out_spec
        rows = play.forward(call)
        if not self._hub.has(len(now.compiled.stages) - 1):
            play.backward(call, [{} for _ in batch.rows], keep_graph=False)
            return None, None, runner._gradients(), []
        per_output = [list(values) for values in zip(*rows, strict=True)]
        names = call.program.outputs[: merges.shown]
        first = {name: k for k, name in reversed([*enumerate(names)]) if isinstance(name, str)}
        flat = runner.merged(rows)
        leaves = {
            k: flat[k].detach().requires_grad_(any(v.requires_grad for v in per_output[k]))
            for k in first.values()
            if isinstance(flat[k], torch.Tensor)
        }
        shown = [
            leaves.get(first.get(name, -1), v) if isinstance(name, str) else name[0]
            for name, v in zip(names, flat, strict=False)
        ]
        whole = tree_unflatten(shown[: spec.num_leaves], spec)
        loss = check_loss(loss_fn(whole) if target is None else loss_fn(whole, beside(whole, target)))
        check_differentiable(loss.requires_grad)
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(loss)
        found = {k: leaf.grad for k, leaf in leaves.items() if leaf.grad is not None}
        pieces = split_gradients(merges, found, per_output, batch.rows)
        seeds: list[dict[str, Any]] = [{} for _ in batch.rows]
        for k, row in pieces.items():
            for seed, piece in zip(seeds, row, strict=True):
                if piece is not None:
                    name = str(names[k])
                    seed[name] = seed[name] + piece if name in seed else piece
        play.backward(call, seeds, keep_graph=False)
        flat = [v.detach() if isinstance(v, torch.Tensor) else v for v in shown[: spec.num_leaves]]
        return loss.detach(), flat, runner._gradients(), []

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _follow_first_replica(self, now: Engine) -> None:
        """Buffers that forwards write are those of the first replica, as with DistributedDataParallel."""
        if self._reduces is None:
            return
        tensors = [table[name] for table, name in now.watch.written()]
        if not tensors:
            return
        first = dist.get_process_group_ranks(self._reduces)[0]

        def follow() -> None:
            for t in tensors:
                dist.broadcast(t, first, group=self._reduces)

        self._channel.awaited(follow, "the buffers of the first replica")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` of the whole model; a parameter that several ranks have counts once.

        Returns:
            The norm of all gradients before, on every rank.
        """
        hub, tied = self._hub, chains(self.stages)
        mine = [p for n, p in self.named_parameters() if n not in tied or hub.has(tied[n][0])]
        largest = norm_type == float("inf")
        how = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        sums = []
        for of_shards in (True, False):
            found = [
                torch.linalg.vector_norm(local(p.grad), norm_type)
                for p in mine
                if p.grad is not None and is_sharded(p) == of_shards
            ]
            norm = torch.linalg.vector_norm(torch.stack(found or [torch.zeros(())]), norm_type)
            sums.append((norm if largest else norm**norm_type).detach())

        def reduce() -> torch.Tensor:
            if hub.sharded and self._reduces is not None:
                dist.all_reduce(sums[0], how, group=self._reduces)
            total = torch.maximum(*sums) if largest else sums[0] + sums[1]
            dist.all_reduce(total, how, group=self.mesh.get_group("pp"))
            return total

        powered: torch.Tensor = self.together(reduce, "the norm of all gradients")
        total = powered if largest else torch.pow(powered, 1.0 / norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for p in self.parameters():
            if p.grad is not None:
                gradient = local(p.grad)
                gradient.mul_(scale.to(gradient.device))
        return total

    # -- what this rank has --------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank's stages, under the model's FQNs."""
        for name, p in super().named_parameters(prefix, recurse, remove_duplicate):
            if not p.is_meta:
                yield name, p

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of this rank's stages, under the model's FQNs."""
        for name, b in super().named_buffers(prefix, recurse, remove_duplicate):
            if not b.is_meta:
                yield name, b

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of this rank's stages, under the model's FQNs; `fxsplit.distributed.save` writes that of all."""
        found = super().state_dict(*args, **kwargs)
        for name in [n for n, v in found.items() if isinstance(v, torch.Tensor) and v.is_meta]:
            del found[name]
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """What this rank has of a state_dict, which may be that of the whole model."""
        mine = {n: v for n, v in state_dict.items() if n in self.state_dict()}
        if strict and (missing := self.state_dict().keys() - mine.keys()):
            raise ArgumentError(
                f"the state_dict has no {', '.join(sorted(missing)[:5])}, which rank {self._channel.rank} has",
                remedy="the state_dict of the model, or strict=False",
            )
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*copying from a non-meta parameter"
            )  # counters of other ranks
            return self.model.load_state_dict(mine, strict=False, assign=assign)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of this rank's parameters."""
        self.model.zero_grad(set_to_none)

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to the others of the pipeline, headers with them; with those of other pipelines over
        the same ranks."""
        return self._channel.sent

    @property
    def replica(self) -> int:
        """Which of the pipelines beside each other this is; 0 where there is one."""
        return 0 if self._reduces is None else dist.get_rank(self._reduces)

    def together(self, collective: Callable[[], Any], what: str) -> Any:
        """The result of what waits for other ranks; if one of them fails, its error.

        Raises:
            RankError: a rank has failed.
        """
        with self._told():
            return self._channel.awaited(collective, what)

    def load_weights(self, source: Any) -> Loaded:
        """As in one process; a rank reads and has those of its own stages.

        Raises:
            RankError: parameters are sharded already.
            WeightsError, ArgumentError: as in one process, on every rank that cannot read its own.
        """
        self._watch.check()
        if self._hub.sharded:
            raise RankError(
                "the parameters are sharded already, and weights come before that",
                remedy="weights= of fxsplit.distributed.compile; or fxsplit.distributed.load, of a checkpoint",
            )
        own = [
            s
            for engine in self.engines()
            for s in engine.compiled.stages
            if self._hub_of(engine).has(s.index)
        ]
        try:
            with self._begun.common.lock, torch.inference_mode(False), torch.no_grad():
                found = fill(self.model, own, source_of(source), whole=False)
        except FxsplitError as error:
            self._watch.refused(error)
            raise
        for engine in self.engines():
            engine.watch.use_current_modules()
        return found

    def verify(self) -> str:
        """Prove that each program is its traced graph. Numbers are not compared: no rank has the whole model.

        Returns:
            What was shown, a line for each rule.

        Raises:
            VerifyError: names the rule that does not hold.
        """
        for engine in self.engines():
            lines = verify_structure(self.model, engine.compiled.traced, engine.compiled.program)
        return "\n".join([*lines, "numbers: not compared, since no rank has the whole model"])

    def verify_micro_batches(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Refused: see `verify`."""
        raise _elsewhere("verify_micro_batches")

    def run_whole(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Refused: a rank has its own stages only."""
        raise _elsewhere("run_whole")

    def recompile(self, *args: Any, **kwargs: Any) -> Self:
        """Refused: all ranks compile together."""
        raise ArgumentError(
            "a pipeline over ranks is not compiled anew in place: every rank has weights of its own stages only",
            remedy="fxsplit.distributed.save(...), pipe.close(), fxsplit.distributed.compile(...) and load(...)",
        )

    def in_place(self) -> Any:
        """Refused: a model that other programs call has all of its weights."""
        raise ArgumentError(
            "a pipeline over ranks does not take the place of its model, of which each rank has a part",
            remedy="pipe(...) under torch.no_grad(), or pipe.step(...), on every rank",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ArgumentError(
            "a pipeline over ranks is not copied: the ranks have compiled it together",
            remedy="fxsplit.distributed.compile(...) once more, on every rank; copy.deepcopy(pipe.state_dict()) for weights",
        )

    def close(self) -> None:
        """The threads of this pipeline end; nothing is sent any more."""
        self._channel.close()

    def extra_repr(self) -> str:
        mine = ", ".join(str(s.index) for s in self.own)
        return f"{len(self)} stages over {self._channel.size} ranks, {mine or 'none'} here, {self.plan!r}"


def _elsewhere(name: str) -> ArgumentError:
    return ArgumentError(
        f"{name} computes with the whole model, of which this rank has a part",
        remedy="pipe.verify() proves the program; fxsplit.compile(model, plan, ...) in one process compares the numbers",
    )


def _add(
    leaves: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    others: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for tensor, gradient in (*zip(leaves, gradients, strict=True), *others):
        if gradient is not None:
            known = found.get(id(tensor))
            found[id(tensor)] = (tensor, gradient if known is None else known[1] + gradient)
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward([t for t, _ in found.values()], [g for _, g in found.values()])
