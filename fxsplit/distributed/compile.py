"""`fxsplit.distributed.compile`: every rank captures the whole model without weights, and fills its own stages."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import compiler
from ..errors import ArgumentError, PlanError, RankError
from ..graph.ir import Stage
from ..graph.place import has_no_values, tensors_of
from ..plan.plan import Plan
from ..runtime.engine import Engine
from ..weights.fill import fill
from ..weights.replayed import Recording, recorded
from ..weights.sources import source_of
from .pipeline import RankPipeline
from .sharding import sharded
from .watch import watch_of_process


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
    made.went_through(pipe.passes)
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
