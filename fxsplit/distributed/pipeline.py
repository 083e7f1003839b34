"""`RankPipeline`: the part of a pipeline that one rank has, with the face that it has in one process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import compiler
from ..batch.merge import split_gradients
from ..compat import TreeSpec, not_traced, parameter_hooks_silenced, tree_unflatten
from ..errors import ArgumentError, FxsplitError, PlanError, RankError
from ..graph.ir import Stage
from ..graph.place import has_no_values, tensors_of
from ..loss.check import check_differentiable
from ..loss.inside import LossInside
from ..loss.losses import beside, check_loss, check_loss_fn
from ..loss.reductions import LossFn
from ..pipeline import Pipeline
from ..plan.plan import Plan
from ..runtime import play
from ..runtime.engine import Batch, Engine
from ..runtime.guarded import Guarded, buffers_as_before
from ..runtime.reentry import computing_for
from ..weights.fill import fill
from ..weights.replayed import Recording, recorded
from ..weights.sources import source_of
from .channel import Channel
from .hub import RankHub, ranks_of_stages
from .packets import Item
from .sharding import is_sharded, local, sharded
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
        own["_channel"] = Channel(group, device, made._watch)
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
            inside = now.loss_inside and len(batch.rows) > 1
            play_it = self._loss_inside if inside else self._loss_outside
            loss, flat, gradients, others = play_it(now, runner, batch, loss_fn, target, reduction)
            self._commit(runner)
            gradients = self._tied(now, call, gradients, len(batch.inputs))
            shared = self._from_last(
                None if loss is None else [loss.detach(), *(flat if output and flat else [])]
            )
            shared[0], gradients = self._averaged(shared[0], gradients, len(batch.inputs))
            _add([*batch.inputs, *call.parameters.values()], gradients, others)
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

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _tied(
        self, now: Engine, call: Any, gradients: list[torch.Tensor | None], first: int
    ) -> list[torch.Tensor | None]:
        """The whole gradient of a parameter that several ranks have: its first stage's rank has it, and hands it on."""
        hub, channel = self._hub, self._channel
        names = list(call.parameters)
        for source, target, fqns in self._ties(now):
            if channel.rank == source:
                rows = [(f, 0, None, gradients[first + names.index(f)]) for f in fqns if f in names]
                channel.send(target, ("tied", *fqns), hub.digest, rows)
            elif channel.rank == target:
                channel.expect(source, [("tied", *fqns)], hub.digest)
                for fqn, _, _, gradient in channel.receive(source):
                    if fqn in names:
                        gradients[first + names.index(fqn)] = gradient
        return gradients

    def _ties(self, now: Engine) -> list[tuple[int, int, list[str]]]:
        hub, found = self._hub, dict[tuple[int, int], list[str]]()
        for fqn, chain in _chains(now.compiled.stages).items():
            source = hub.rank_of[chain[0]]
            for target in sorted({hub.rank_of[s] for s in chain} - {source}):
                found.setdefault((source, target), []).append(fqn)
        return [(source, target, fqns) for (source, target), fqns in sorted(found.items())]

    def _averaged(
        self, loss: torch.Tensor, gradients: list[torch.Tensor | None], first: int
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Loss and gradients of parameters, averaged over the replicas of the pipeline, as DistributedDataParallel does."""
        if self._reduces is None:
            return loss, gradients
        size = self._reduces.size()
        rows: dict[torch.dtype, list[int]] = {}
        for k in range(first, len(gradients)):
            g = gradients[k]
            if g is not None:
                rows.setdefault(g.dtype, []).append(k)
        flats = {dtype: torch.cat([gradients[k].reshape(-1) for k in ks]) for dtype, ks in rows.items()}  # type: ignore[union-attr]
        total = loss.detach().clone()

        def reduce() -> None:
            for flat in (*flats.values(), total):
                dist.all_reduce(flat, group=self._reduces)

        self._channel.awaited(reduce, "the sums over replicas")
        for dtype, ks in rows.items():
            pieces = (flats[dtype] / size).split([gradients[k].numel() for k in ks])  # type: ignore[union-attr]
            for k, piece in zip(ks, pieces, strict=True):
                gradients[k] = piece.view(gradients[k].shape)  # type: ignore[union-attr]
        return total / size, gradients

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
        hub, chains = self._hub, _chains(self.stages)
        mine = [p for n, p in self.named_parameters() if n not in chains or hub.has(chains[n][0])]
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
        """Bytes that this rank has sent to others of its pipeline, headers with them."""
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

    def close(self) -> None:
        """The threads of this pipeline end; nothing is sent any more."""
        self._channel.close()

    def extra_repr(self) -> str:
        mine = ", ".join(str(s.index) for s in self.own)
        return f"{len(self)} stages over {self._channel.size} ranks, {mine or 'none'} here, {self.plan!r}"


def _chains(stages: Sequence[Stage]) -> dict[str, list[int]]:
    """Parameters that several stages read → these."""
    chains: dict[str, list[int]] = {}
    for stage in stages:
        for fqn in stage.parameters:
            chains.setdefault(fqn, []).append(stage.index)
    return {fqn: chain for fqn, chain in chains.items() if len(chain) > 1}


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


def compile(
    make_model: Callable[[], nn.Module],
    plan: Plan,
    mesh: DeviceMesh,
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    parallelize: Callable[..., Any] | None = None,
    weights: Any = None,
    leaf_modules: Sequence[str | type[nn.Module]] = (),
    tracer: Any = None,
) -> RankPipeline:
    """This rank's part of a pipeline: every rank captures the model without weights, and has those of its own stages.

    Args:
        make_model: makes the model; it is called under ``torch.device("meta")``, on every rank.
        plan: as in one process; stages go to the ranks of ``mesh["pp"]`` in rows of neighbours, or one worker of a schedule
            with several stages each to one rank. Devices and replicas are the mesh's.
        mesh: of `init`, or one of your own with a dimension ``"pp"``, and maybe ``"dp"``.
        example_args, example_kwargs: one call; the same on every rank.
        parallelize: called with the module of each stage of this rank and ``mesh=mesh["dp"]``, when it has its weights:
            ``torch.distributed.fsdp.fully_shard``, or a function that calls it. Without, each replica has whole parameters.
        weights: as of `fxsplit.compile`; a rank reads those of its stages. Without, they are those that `make_model` makes
            in one process after the same ``torch.manual_seed``.
        leaf_modules, tracer: as of `fxsplit.compile`.

    Raises:
        RankError: the ranks do not compile the same: versions, plan, model or example.
        PlanError: the plan asks for what does not go over ranks.
        FxsplitError: as of `fxsplit.compile`, on every rank.
    """
    watch = watch_of_process()
    watch.check()
    try:
        return _compiled(
            make_model, plan, mesh, example_args, example_kwargs, parallelize, weights, leaf_modules, tracer
        )
    except BaseException as error:
        watch.failed(error)
        raise


def _compiled(
    make_model: Callable[[], nn.Module],
    plan: Plan,
    mesh: DeviceMesh,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None,
    parallelize: Callable[..., Any] | None,
    weights: Any,
    leaf_modules: Sequence[str | type[nn.Module]],
    tracer: Any,
) -> RankPipeline:
    _check(plan, mesh)
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = mesh["pp"].size()
    model, recording = recorded(make_model)
    if not has_no_values(model):
        raise ArgumentError(
            "make_model made a model that has weights already",
            remedy="a function that makes it, such as lambda: Model(config), and weights=model.state_dict()",
        )
    here = plan.replace(devices=str(device)) if device.type != "cpu" else plan
    pipe = compiler.compile(
        model,
        here,
        example_args=example_args,
        example_kwargs=example_kwargs,
        leaf_modules=leaf_modules,
        tracer=tracer,
    )
    if len(pipe) < ranks:
        raise PlanError(
            f"{len(pipe)} stages for {ranks} ranks: some would have nothing to do",
            remedy=f"Plan(stages={ranks}), or init(pp={len(pipe)})",
        )
    made = RankPipeline.of(pipe, mesh, device)
    _compare(made, plan)
    everything = [stage for engine in made.engines() for stage in _own(made, engine)]
    source = source_of(weights if weights is not None else _made(made, recording, everything))
    with torch.inference_mode(False), torch.no_grad():
        fill(model, everything, source, whole=False)
    for engine in made.engines():
        engine.watch.use_current_modules()
    if parallelize is not None:
        _shard(made, parallelize, mesh)
    return made


def _shard(pipe: RankPipeline, parallelize: Callable[..., Any], mesh: DeviceMesh) -> None:
    if "dp" not in (mesh.mesh_dim_names or ()):
        raise RankError("parallelize= has no replicas to shard over", remedy="init(pp=..., dp=2), say")
    if len(pipe.engines()) > 1:
        raise PlanError(
            "the model takes another path in eval(), and FSDP shards for one program",
            remedy="dp= without parallelize=, or a model with one path",
        )
    (engine,) = pipe.engines()
    hub, plan = pipe._hub_of(engine), pipe.plan
    halves = any(tape.halves for tape in engine.crew.tapes)
    hub.sharded = sharded(pipe.own, parallelize, mesh["dp"], plan.schedule_name, halves=halves)
    engine.watch.look_at(pipe.own)
    engine.watch.use_current_modules()


def _own(pipe: RankPipeline, engine: Engine) -> list[Stage]:
    hub = pipe._hub_of(engine)
    return [stage for stage in engine.compiled.stages if hub.has(stage.index)]


def _check(plan: Plan, mesh: DeviceMesh) -> None:
    if "pp" not in (mesh.mesh_dim_names or ()):
        raise RankError(
            "the mesh has no dimension 'pp'",
            remedy="mesh = fxsplit.distributed.init(pp=2), or mesh_dim_names=('pp', 'dp')",
        )
    for asked, what, remedy in (
        (
            plan.replicas not in (None, 1),
            "replicas=",
            "init(pp=..., dp=...): replicas are a dimension of the mesh",
        ),
        (plan.devices is not None, "devices=", "leave it out: each rank has one device"),
        (plan.device_map is not None, "device_map=", "cut=[...], and one device for each rank"),
        (plan.offload, "offload=", "more ranks, or offload in one process"),
        (
            plan.sync_batch_norm,
            "sync_batch_norm=",
            "deferred_batch_norm=True, or sync_batch_norm in one process",
        ),
        (not plan.gather, "gather=False", "leave it out: the output is on every rank"),
    ):
        if asked:
            raise PlanError(f"{what} does not go over ranks", remedy=remedy)


def _compare(pipe: RankPipeline, plan: Plan) -> None:
    """All ranks have the same versions, plan, program and example.

    Raises:
        RankError: names what differs, on every rank.
    """

    def digest(text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    code = ["\n".join(s.module.code for s in one.compiled.stages) for one in pipe.engines()]
    sizes = [
        (n, tuple(t.shape), str(t.dtype))
        for n, t in (*pipe.model.named_parameters(), *pipe.model.named_buffers())
    ]
    mine = {
        "fxsplit": vars(sys.modules["fxsplit"])["__version__"],
        "torch": str(torch.__version__),
        "Python": sys.version.split()[0],
        "plan": repr(plan),
        "program (hash)": digest("\n\n".join(code)),
        "model (hash)": digest(json.dumps(sizes)),
        "example": str([(tuple(x.shape), str(x.dtype)) for x in pipe.example]),
        "stages of ranks": str(list(pipe.rank_of)),
    }
    everybody: list[Any] = [None] * dist.get_world_size()
    pipe._channel.awaited(
        lambda: dist.all_gather_object(everybody, mine), "what the other ranks have compiled"
    )
    for name in mine:
        groups: dict[str, list[int]] = {}
        for rank, one in enumerate(everybody):
            groups.setdefault(one[name], []).append(rank)
        if len(groups) > 1:
            said = "; ".join(
                f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in groups.items()
            )
            raise RankError(
                f"the ranks do not compile the same {name}: {said}",
                remedy="the same script, arguments and versions on every rank",
            )


def _made(pipe: RankPipeline, recording: Recording, own: Sequence[Stage]) -> dict[str, torch.Tensor]:
    """The weights of some stages as `make_model` makes them in one process, from the random numbers of the first rank.

    A rank whose generator is in the same state, as it is after the same ``torch.manual_seed``, has drawn them, then.
    """
    before = torch.get_rng_state()
    numbers = before.clone()
    first = dist.get_process_group_ranks(dist.group.WORLD)[0]
    pipe._channel.awaited(lambda: dist.broadcast(numbers, first), "the random numbers of the weights")
    names = [name for holder in _names_read(pipe.model, own) for name in holder]
    torch.set_rng_state(numbers)
    try:
        return recording.replayed(pipe.model, {*names})
    finally:
        if not torch.equal(before, numbers):
            torch.set_rng_state(before)


def _names_read(model: nn.Module, stages: Sequence[Stage]) -> Iterator[list[str]]:
    """Per tensor that some stages have, its names."""
    read = {id(getattr(holder, kind)[key]) for s in stages for holder, kind, key in tensors_of(model, s)}
    names: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    yield from (row for key, row in names.items() if key in read)
