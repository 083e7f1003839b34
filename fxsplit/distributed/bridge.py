"""Stages for the training loop of torch.distributed.pipelining (TDP), where TDP computes them rightly.

TDP's stages are a chain: each sends its outputs to the next one only. So what skips stages is relayed by those between.
TDP is told the sizes of what travels, and needs no forward of its own to find them out, which would count in BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..compat import fake_tensors, tree_leaves, tree_unflatten
from ..errors import ArgumentError, PlanError, RankError
from ..graph.flow import parameter_chains
from ..graph.ir import Program, Stage, Traced
from ..pipeline import Pipeline
from ..plan.checkpoint import Checkpoint
from .pipeline import RankPipeline

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

Values = Mapping[str, torch.Tensor]


class Relay(nn.Module):
    """A stage as TDP calls it: what comes over the cut before it, to what goes over the cut behind it.

    Its parameters and buffers have the model's FQNs; they are the model's own.

    Args:
        takes: names of the values that come; of the first stage the model's inputs.
        known: value → a tensor on ``meta``; or what it always is, if it is no tensor.
        gives: names of the values that leave.
    """

    _at: tuple[Stage, Traced, Sequence[str], Sequence[str], Sequence[Any] | None]
    _known: Mapping[str, Any]

    def __init__(
        self,
        stage: Stage,
        pipe: Pipeline,
        known: Mapping[str, Any],
        takes: Sequence[str],
        gives: Sequence[str],
    ) -> None:
        super().__init__()
        results = pipe.program.outputs[: pipe.traced.out_spec.num_leaves]
        last = stage is pipe.program.stages[-1]
        self.__dict__["_at"] = stage, pipe.traced, takes, gives, results if last else None
        self.__dict__["_known"] = known
        for local, fqn in sorted(stage.paths.items(), key=lambda item: item[1].count(".")):
            _hang(self, fqn, getattr(stage.module, local), pipe.model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What TDP sends on; of the last stage the model's output.

        Raises:
            ArgumentError: a micro-batch is not like the example's, or what had no gradient has one now.
        """
        stage, traced, takes, gives, results = self._at
        # TDP gives the keyword arguments of a step to every stage of a rank.
        given = traced.signature.flatten(args, kwargs) if stage.index == 0 else args
        values: dict[str, Any] = {**self._known, **dict(zip(takes, given, strict=True))}
        read = [_edge([values[name]])[0] for name in stage.inputs]
        for name, value in _computed(stage, read).items():
            _check_same(name, value, self._known[name], stage)
            values[name] = value
        if results is not None:
            return tree_unflatten([values[name] for name in results], traced.out_spec)
        for name in gives:
            _check_like(name, values[name], self._known[name], stage)
        return tuple(_edge([values[name].contiguous() for name in gives], given if stage.index else ()))


class _Edge(torch.autograd.Function):
    """The same values, of which no gradient comes without the others'.

    Each reader adds up its own gradients first, as in one process. TDP wants gradients contiguous, and values that are no
    views, since it detaches them in place. Where backward is in two, it finds only the parameters between what came and
    some value that depends on it; so all that leaves depends on what came.

    Args:
        came: how many of the values came over the cut before: they only lead to the others.
    """

    @staticmethod
    def forward(ctx: Any, came: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.came = came
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in values[came:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (None,) * (1 + ctx.came) + tuple(g if g is None else g.contiguous() for g in gradients)


def _edge(values: Sequence[Any], came: Sequence[Any] = ()) -> list[Any]:
    leading = [x for x in came if x.requires_grad]
    marked = [k for k, x in enumerate(values) if isinstance(x, torch.Tensor) and x.requires_grad]
    found = list(values)
    if marked:
        crossed = _Edge.apply(len(leading), *leading, *(values[k] for k in marked))  # type: ignore[no-untyped-call]
        for k, x in zip(marked, crossed, strict=True):
            found[k] = x
    return found


def _computed(stage: Stage, inputs: Sequence[torch.Tensor], call: Callable[..., Any] | None = None) -> Any:
    found = (call or stage.module)(*inputs)
    return dict(zip(stage.outputs, (found,) if len(stage.outputs) == 1 else found or (), strict=True))


def _check_same(name: str, value: Any, known: Any, stage: Stage) -> None:
    """What is no tensor does not travel: other stages take it for what it was."""
    if not isinstance(known, torch.Tensor) and value is not known and value != known:
        raise ArgumentError(
            f"{name} is {value!r}, and was {known!r}: torch.distributed.pipelining hands on tensors only",
            where=f"stage {stage.index}",
            remedy="call torch_pipelining again after train() or eval()",
        )


def _check_like(name: str, value: torch.Tensor, known: torch.Tensor, stage: Stage) -> None:
    """TDP has buffers for what was said: gloo takes anything else without a word, and gradients are dropped."""
    if (value.shape, value.dtype) != (known.shape, known.dtype):
        raise ArgumentError(
            f"{name} is {value.dtype} {list(value.shape)}, and the next stage waits for {known.dtype} {list(known.shape)}",
            where=f"stage {stage.index}",
            remedy="batches as large as the example, such as DataLoader(..., drop_last=True)",
        )
    if value.requires_grad and not known.requires_grad:
        raise ArgumentError(
            f"{name} needs a gradient, which torch.distributed.pipelining would drop: it did not need one before",
            where=f"stage {stage.index}",
            remedy="call torch_pipelining again after requires_grad_(); inputs of the model have no gradient here",
        )


def _hang(root: nn.Module, fqn: str, value: Any, model: nn.Module) -> None:
    """A module, parameter or buffer of the model under its FQN, with empty modules above it."""
    path, _, leaf = fqn.rpartition(".")
    for name in path.split(".") if path else ():
        root = root._modules.setdefault(name, nn.Module())  # type: ignore[assignment]
    owner = model.get_submodule(path)
    if isinstance(value, nn.Module):
        root._modules[leaf] = value
    elif leaf in owner._parameters:
        root._parameters.setdefault(leaf, value)
    elif leaf in owner._buffers:
        root._buffers.setdefault(leaf, value)
        root._non_persistent_buffers_set |= {leaf} & owner._non_persistent_buffers_set


def torch_pipelining(
    pipe: Pipeline,
    mesh: DeviceMesh,
    schedule: str | type[Any] = "Schedule1F1B",
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    scale_grads: bool = True,
) -> tuple[list[PipelineStage], Any]:
    """This rank's stages and a schedule of torch.distributed.pipelining, for who has its training loop.

    Every rank calls ``schedule.step``: the first with the model's arguments, the last with ``target=``. Micro-batches are
    ``plan.micro_batches``, all of one size, that of the example; the plan's own schedule is not played. Dropout draws
    from each rank's own generator. Replicas of the pipeline are the caller's to average.

    Args:
        pipe: of `fxsplit.compile` or `fxsplit.distributed.compile`.
        mesh: with a dimension ``"pp"``.
        schedule: a schedule class of torch.distributed.pipelining, or its name: ``"ScheduleGPipe"``, ``"1f1b"``.
        loss_fn: ``loss_fn(output, target)`` of a micro-batch; without, there is no backward.
        scale_grads: whether gradients are divided by the number of micro-batches, as a loss that is a mean wants it.

    Raises:
        PlanError: names what torch.distributed.pipelining does not do, or computes wrongly.
        RankError: the mesh has no dimension ``"pp"``.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    if "pp" not in (mesh.mesh_dim_names or ()):
        raise RankError("the mesh has no dimension 'pp'", remedy="mesh = fxsplit.distributed.init(pp=2)")
    kind = _class_of(schedule)
    _check_plan(pipe)
    _check_model(pipe)
    several = issubclass(kind, PipelineScheduleMulti)
    rank_of = _ranks_of(pipe, kind, several, mesh["pp"].size())
    here = [s for s in pipe.stages if rank_of[s.index] == mesh.get_local_rank("pp")]
    _check_devices(here, mesh)
    known = _sizes(pipe)
    cuts = _cuts(pipe.program, known)
    _check_halves(pipe, kind, known, cuts)
    stages = [_stage_of(stage, pipe, mesh, known, cuts) for stage in here]
    n = pipe.plan.micro_batches
    return stages, kind(stages if several else stages[0], n, loss_fn=loss_fn, scale_grads=scale_grads)


def _stage_of(
    stage: Stage, pipe: Pipeline, mesh: DeviceMesh, known: Mapping[str, Any], cuts: Sequence[Sequence[str]]
) -> PipelineStage:
    from torch.distributed.pipelining import PipelineStage

    takes, gives = cuts[stage.index : stage.index + 2]
    return PipelineStage(
        Relay(stage, pipe, known, takes, gives),
        stage.index,
        len(pipe),
        stage.device,
        input_args=tuple(known[name] for name in takes),
        output_args=tuple(known[name] for name in gives),
        group=mesh.get_group("pp"),
    )


def _class_of(schedule: str | type[Any]) -> type[Any]:
    from torch.distributed.pipelining import schedules

    if not isinstance(schedule, str):
        return schedule
    try:
        found: type[Any] = schedules.get_schedule_class(schedule.removeprefix("Schedule"))
    except ValueError as error:
        raise PlanError(
            f"schedule={schedule!r} is none of torch.distributed.pipelining's: {error}",
            remedy='"1f1b", "gpipe", "ScheduleInterleaved1F1B", or the class itself',
        ) from None
    return found


def _cuts(program: Program, known: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The tensors that come to each stage, and at the end those that the model gives: made before, and read behind."""
    made, readers, results = program.producers(), program.readers(), program.outputs
    tensors = [v for v in made if isinstance(known[v], torch.Tensor)]
    cuts = [program.inputs]
    for k in range(1, len(program.stages)):
        cuts.append(
            tuple(v for v in tensors if made[v] < k and (v in results or any(r >= k for r in readers[v])))
        )
    return [*cuts, tuple(v for v in results if isinstance(v, str))]


def _sizes(pipe: Pipeline) -> dict[str, Any]:
    """Every value of a micro-batch: a tensor on ``meta``, or what it is if it is no tensor; by what sizes alone come to.

    Raises:
        PlanError: a stage asks for values, or hands on what is no tensor.
    """
    split = pipe.dims.split(pipe.example, [_rows(pipe)] * pipe.plan.micro_batches)[0]
    with torch.device("meta"):
        found: dict[str, Any] = {
            name: torch.empty(x.shape, dtype=x.dtype)
            for name, x in zip(pipe.program.inputs, split, strict=True)
        }
    for stage in pipe.stages:
        with fake_tensors(), torch.enable_grad():
            own = {
                name: _like(t, stage)
                for name, t in (*stage.module.named_parameters(), *stage.module.named_buffers())
            }
            call = _with(stage.module, own)
            try:
                made = _computed(stage, [_like(found[name], stage) for name in stage.inputs], call)
            except Exception as error:  # whatever the model's code raises
                raise _refusal(
                    f"the sizes that stage {stage.index} gives are not known without values: {str(error).splitlines()[0]}",
                    _span(stage),
                    "sends sizes along with values",
                ) from error
        for name, value in made.items():
            if isinstance(value, torch.Tensor):
                grad = value.requires_grad
                value = torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=grad)
            elif any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
                raise _refusal(
                    f"{name} is {type(value).__name__} with tensors inside, and goes over a cut",
                    _span(stage),
                    "sends any structure",
                )
            found[name] = value
    return found


def _with(module: nn.Module, tensors: Values) -> Callable[..., Any]:
    return lambda *inputs: torch.func.functional_call(module, dict(tensors), inputs)


def _like(x: Any, stage: Stage) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device=stage.device, requires_grad=x.requires_grad
    )


def _rows(pipe: Pipeline) -> int:
    """Of a micro-batch; without a batch, 0: there is one micro-batch then."""
    return (pipe.dims.batch_size(pipe.example) or 0) // pipe.plan.micro_batches


def _refusal(what: str, where: str | None, does: str) -> PlanError:
    return PlanError(what, where=where, remedy=f"fxsplit.distributed.compile and pipe.step, which {does}")


def _span(stage: Stage) -> str:
    return f"stage {stage.index}, {' … '.join(dict.fromkeys(stage.modules)) or 'the model'}"


def _check_plan(pipe: Pipeline) -> None:
    plan, batch = pipe.plan, pipe.dims.batch_size(pipe.example)
    uneven = plan.micro_batches > 1 and (not batch or batch % plan.micro_batches)
    for asked, what, does in (
        (
            uneven,
            f"{batch} rows do not make {plan.micro_batches} micro-batches of one size, and its buffers have one size",
            "splits any batch",
        ),
        (
            Checkpoint.of(plan.checkpoint).anything,
            "checkpoint= is not kept: nothing is computed again",
            "does so",
        ),
        (any(len(s.row) > 1 for s in pipe.stages), "replicas= are not played", "has init(pp=..., dp=...)"),
        (plan.offload, "offload=True is not kept: parameters stay where they are", "has more ranks"),
        (plan.sync_batch_norm, "sync_batch_norm= is not kept", "has deferred_batch_norm="),
        (plan.deferred_batch_norm, "deferred_batch_norm= is not kept", "updates statistics once a batch"),
        (plan.detect_anomaly is not None, "detect_anomaly= is not kept", "looks for them"),
    ):
        if asked:
            raise _refusal(f"torch.distributed.pipelining: {what}", None, does)


def _check_model(pipe: Pipeline) -> None:
    for what, where, does in _wrong(pipe):
        raise _refusal(what, where, does)


def _wrong(pipe: Pipeline) -> Iterator[tuple[str, str | None, str]]:
    """What torch.distributed.pipelining would compute wrongly, or fail at."""
    for fqn, chain in parameter_chains(pipe.program).items():
        if len(chain) > 1:
            yield (
                f"stages {', '.join(map(str, chain))} share {fqn}: torch.distributed.pipelining gives each its own part "
                "of the gradient",
                fqn,
                "adds them up",
            )
    if pipe.traced.other_mode is not None:
        yield "the model takes another path in eval()", None, "has a program for each mode"
    for stage in pipe.stages:
        if stage.stateful:
            yield "a stage changes what is no buffer", ", ".join(stage.changes), "knows when it does so"
    for name, dim in zip(pipe.dims.names, pipe.dims.dims, strict=True):
        if dim != 0 and pipe.plan.micro_batches > 1:
            how = "is not split" if dim is None else f"has its rows in dimension {dim}"
            yield f"torch.distributed.pipelining splits dimension 0, and {name} {how}", name, "knows that"
    for k, (merge, value) in enumerate(zip(pipe.merges, pipe.program.outputs, strict=False)):
        if not isinstance(value, str) or (
            pipe.plan.micro_batches > 1 and (merge.how, merge.dim) != ("rows", 0)
        ):
            yield (
                f"output {k} of the model is no tensor with rows in dimension 0",
                str(value) if isinstance(value, str) else repr(value[0]),
                "merges micro-batches as the model would",
            )
    spec = pipe.traced.out_spec
    nested = tree_unflatten([0] * spec.num_leaves, spec)
    if type(nested) not in (int, tuple, list) or (nested != 0 and set(map(type, nested)) != {int}):
        yield (
            "the model gives something else than a tensor, or a tuple or list of them",
            f"it gives {type(nested).__name__}",
            "takes any structure",
        )


def _check_halves(
    pipe: Pipeline, kind: type[Any], known: Mapping[str, Any], cuts: Sequence[Sequence[str]]
) -> None:
    """Where backward is in two, weights get their part only by way of gradients of what came."""
    from torch.distributed.pipelining import schedules

    halves = (
        schedules.ScheduleInterleavedZeroBubble,
        schedules.ScheduleZBVZeroBubble,
        schedules.ScheduleDualPipeV,
    )
    for stage in pipe.stages[1:]:
        trained = any(p.requires_grad for p in stage.module.parameters())
        if (
            issubclass(kind, halves)
            and trained
            and not any(known[v].requires_grad for v in cuts[stage.index])
        ):
            raise _refusal(
                f"nothing that comes to stage {stage.index} has a gradient, and {kind.__name__} would give its parameters none",
                _span(stage),
                'has schedule="zb_h1"; or ScheduleInterleaved1F1B, whose backward is whole',
            )


def _ranks_of(pipe: Pipeline, kind: type[Any], several: bool, ranks: int) -> Sequence[int]:
    """Stage → rank, as the schedule wants it."""
    from torch.distributed.pipelining import schedules

    stages = len(pipe)
    if (not several and stages != ranks) or stages % ranks:
        raise PlanError(
            f"{kind.__name__} has {'equally many stages' if several else 'one stage'} on each rank: {stages} stages do "
            f"not go on {ranks} ranks",
            remedy=f"Plan(stages={ranks}), or ScheduleInterleaved1F1B with a multiple of {ranks}",
        )
    is_v = issubclass(kind, schedules.ScheduleZBVZeroBubble | schedules.ScheduleDualPipeV)
    found = [s % ranks for s in range(stages)]
    if is_v:
        found = [s % ranks if s // ranks % 2 == 0 else ranks - 1 - s % ranks for s in range(stages)]
    if isinstance(pipe, RankPipeline) and list(pipe.rank_of) != found:
        raise PlanError(
            f"{kind.__name__} wants stages on ranks {found}, and this pipeline has them on {list(pipe.rank_of)}",
            remedy='Plan(schedule="interleaved_1f1b", workers=...), or fxsplit.compile on every rank',
        )
    return found


def _check_devices(stages: Sequence[Stage], mesh: DeviceMesh) -> None:
    for stage in stages:
        if stage.device.type != mesh.device_type:
            raise _refusal(
                f"{stage.device} is not the mesh's {mesh.device_type}", _span(stage), "places stages"
            )
