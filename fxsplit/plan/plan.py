"""`Plan`: what the user wants — where to cut, how to weigh, where to place, how to run. Knows nothing of graphs."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from ..arguments import PLAN_SPELLINGS, explained
from ..errors import PlanError, did_you_mean
from ..schedules.catalog import IN_V, NAMES, SHARED, fits_a_v, schedule_of, usual_workers
from ..schedules.schedule import Schedule
from .checkpoint import Checkpoint
from .costs import Cost
from .devices import DeviceLike, device_map_of, device_name, memory_limits_of
from .files import fields_of, plain_fields, read_fields, write_fields
from .hardware import Device, described

EFFORTS = ("normal", "search")
ANOMALIES = ("nan", "inf")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is cut, placed and run. Frozen, validated on construction, and equal by value.

    At most one field says where to cut; the default is one stage. Those that say how to weigh go with `stages`.

    Where to cut:
        stages: number of stages, cut automatically so that the heaviest is as light as possible.
        balance: units per stage, such as ``[2, 2]``. Units of an `nn.Sequential` are its children; of any
            other model, the smallest groups of graph nodes that may be cut apart, in program order.
        cut: module paths (FQNs) that each begin a new stage, such as ``["h.4", "h.8"]``.
        device_map: ``{module path: device}`` or ``{module path: (device, output device)}``; the deepest
            matching path wins, ``""`` is the whole model. An output of the model is where it is computed, or, where
            keys with pairs hold what computes it, on the output device of the outermost of them. A parameter that
            is read on two devices is where a key names it, or else where it is read first. Or a word of Accelerate's, which makes such a map of
            the bytes of parameters and buffers, over modules in execution order: ``"auto"`` and ``"balanced"``
            (the heaviest device is as light as possible), ``"balanced_low_0"`` (as little as possible on the
            first device), ``"sequential"`` (each device is filled before the next).

    How to weigh:
        cost: what the load of a stage is: ``"params"`` (bytes of parameters), ``"memory"`` (those with gradients and
            optimizer states, and what is kept for backward where nothing is recomputed), ``"flops"`` (floating point operations of forward
            and backward), ``"roofline"`` (seconds on the described `hardware`: the larger of FLOPs by its rate and
            bytes by its bandwidth), or ``"time"`` (forward and backward of each node, measured on the example,
            in seconds). Or seconds of your own: a function of `fxsplit.NodeCost` (to read a parameter takes none), or ``{node name: seconds}``,
            such as ``pipe.assignment.costs``. Where a load is in seconds, the distinct bytes that enter and
            leave a stage count too, by the link of the `hardware`.
        hardware: a `fxsplit.Device` that describes each device, or the name of a known one such as
            ``"A100-80GB"``, or a list with one for each stage. Its memory is a limit.
        optimizer_states: values that the optimizer keeps for each parameter: 2 for Adam, 1 for SGD with momentum, 0
            for plain SGD; None where nothing is trained and neither gradients nor activations are kept.
            Memory is parameters, gradients, these, and what is kept for backward.
        effort: ``"normal"``, or ``"search"`` to move units between stages beyond the orders that are tried.

    Where to place:
        devices: one device for all stages, or a list with one for each stage, or with a row of devices for each
            stage, one for each of its replicas: ``[["cuda:0", "cuda:1"], ["cuda:2"]]``; not together with
            `device_map`. Default: the device that the model is on.
        max_memory: ``{device: bytes or "10GiB"}``, the most that parameters and buffers may take on each device.
            With a word as `device_map` these are the devices, in this order; ``"cpu"`` without an index comes last
            and holds only what the others cannot. Without it a word takes all accelerators of the machine with
            their free memory, or ``"cpu"`` where there is none.
        offload: whether parameters stay in the CPU's memory, and with them gradients and the states of optimizers, and are
            on the device of their stage only while it computes: from its first micro-batch to its last. Those of the next
            stage are fetched meanwhile. With one micro-batch, or ``schedule="breadth_first", workers=1``, a device holds
            the weights of two stages at a time.
        no_split_module_classes: modules that a word does not spread over devices: names of classes, or classes.

    How to run:
        micro_batches: the number of micro-batches that a batch is split into, at most. Default: so many that all
            replicas of a stage get equally many, and at least one (their least common multiple; with ``"auto"`` the
            number of devices).
        schedule: ``"gpipe"`` (Huang et al., 2019); ``"1f1b"`` (Narayanan et al., 2021), which keeps fewer
            micro-batches in `Pipeline.step`; ``"zb_h1"`` (Qi et al., 2023), with backward in two and a smaller
            bubble; with several stages on each of the `workers` ``"interleaved_1f1b"``, ``"breadth_first"``
            (Lamy-Poirier, 2023) and ``"interleaved_zero_bubble"``, with exactly two ``"zb_v"`` (Qi et al., 2023) and
            ``"dual_pipe_v"`` (DeepSeek and Sea AI Lab, 2025); or a `fxsplit.Schedule` of your own, such as
            ``Schedule.from_csv(text)``. A call ``pipe(x)`` with its loss outside goes forward with all first.
        workers: how many workers the stages of such a schedule share: stage s runs on worker s mod workers, and in the
            V of the last two worker r has stages r and 2 workers - 1 - r. Default: one for each of the list of
            `devices`, which then has one device for each worker.
        checkpoint: what is not kept for backward but computed again: everything, of the micro-batches
            ``"always"``, ``"except_last"`` or ``"never"`` (torchgpipe's three modes; the one that ``"except_last"``
            keeps is the one that goes backward first, which is the last there, and the first here); or, in all of them, the modules
            of a list of paths, those for which a function ``(path, module) -> bool`` is true, or as much as
            it takes to keep the activations of each device within a `Budget`.
        replicas: how many workers run each stage, or a list with the number for each stage; micro-batch i of a
            stage with r replicas runs on its worker i mod r. Replicas on one device share the parameters; on
            another device they hold copies, which follow the parameters. ``"auto"`` picks stages and replicas
            together for the list of `devices` (with `stages`, that many).
        gather: whether ``pipe(x)`` gives the output of the whole batch; otherwise a `fxsplit.Scattered`: the outputs of
            the micro-batches, each on the device where it was made, for a `fxsplit.Criterion`. `Pipeline.step` is the
            same either way.
        threads: how many each worker uses inside of an operation of the CPU. Default: those of the caller
            (`torch.get_num_threads`), shared out evenly.
        deferred_batch_norm: whether the running statistics of batch normalisation are updated once, after a whole
            forward, by those of the whole batch; otherwise each micro-batch updates them. Either way a micro-batch is
            normalised by its own.
        sync_batch_norm: whether batch normalisation uses the statistics of the whole batch: micro-batches of a stage
            meet at each such layer, whatever replicas they are on, and go backward together. GPipe only.
        detect_anomaly: ``"nan"`` to end in an error at the first NaN, which names its stage, micro-batch and node (or
            whose gradient it is); ``"inf"`` for infinities above zero too (those below zero are masks). Slow: stages
            run node by node.
        batch_dims: ``{argument name: dimension or None}`` for tensors whose batch dimension is not found
            by itself; ``None`` gives the whole tensor to every micro-batch.

    Raises:
        PlanError: a field is wrong or contradicts another one; the message names both.
    """

    stages: int | None = None
    balance: Sequence[int] | None = None
    cut: Sequence[str] | None = None
    device_map: str | Mapping[str, Any] | None = None
    cost: str | Mapping[str, float] | Callable[[Any], float] | Cost = "params"
    hardware: Device | str | Sequence[Device | str] | None = None
    optimizer_states: int | None = 2
    effort: str = "normal"
    devices: DeviceLike | Sequence[DeviceLike | Sequence[DeviceLike]] | None = None
    max_memory: Mapping[Any, Any] | None = None
    offload: bool = False
    no_split_module_classes: str | type[nn.Module] | Sequence[Any] | None = None
    micro_batches: int = None  # type: ignore[assignment]  # a number once the plan is made
    schedule: str | Schedule = "gpipe"
    workers: int | None = None
    checkpoint: str | Sequence[str] | Callable[[str, nn.Module], bool] | Checkpoint = "never"
    replicas: int | str | Sequence[int] = 1
    gather: bool = True
    threads: int | None = None
    deferred_batch_norm: bool = False
    sync_batch_norm: bool = False
    detect_anomaly: str | None = None
    batch_dims: Mapping[str, int | None] | None = None

    def __post_init__(self) -> None:
        asked = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        self._set("_asked", {n: _kept(v) for n, v in asked.items() if v is not _DEFAULTS[n]})
        self._one_way_to_cut()
        self._check_cost()
        self._check_choice("effort", EFFORTS)
        self._set("checkpoint", Checkpoint.of(self.checkpoint))
        follows = _is_left_out(self.micro_batches)  # the replicas, which are looked at later
        if follows:
            self._set(
                "micro_batches", self.schedule.micro_batches if isinstance(self.schedule, Schedule) else 1
            )
        _check_positive("micro_batches", self.micro_batches)
        self._check_schedule()
        if self.devices is not None:
            self._check_devices()
        self._check_replicas()
        if follows and not isinstance(self.schedule, Schedule):
            self._set("micro_batches", self._enough_micro_batches())
        self._check_hardware()
        if not isinstance(self.gather, bool):
            raise PlanError(f"gather={self.gather!r} is not True or False", remedy="gather=False")
        if self.threads is not None:
            _check_positive("threads", self.threads)
        self._check_batch_norm()
        if self.detect_anomaly is not None:
            self._check_choice("detect_anomaly", ANOMALIES)
        self._check_offload()
        if self.max_memory is not None:
            self._set("max_memory", memory_limits_of(self.max_memory))
        if self.no_split_module_classes is not None:
            self._check_no_split()
        if self.batch_dims is not None:
            self._check_batch_dims()

    def ways_to_cut(self) -> list[str]:
        """The fields among stages, balance, cut and device_map that are set."""
        return [
            name for name in ("stages", "balance", "cut", "device_map") if getattr(self, name) is not None
        ]

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _one_way_to_cut(self) -> None:
        ways = self.ways_to_cut()
        if len(ways) > 1:
            raise PlanError(
                f"{ways[0]}= and {ways[1]}= both say where to cut",
                remedy=f"keep one of {ways[0]}=, {ways[1]}=",
            )
        if not ways:
            self._set("stages", None if self.replicas == "auto" else 1)
        elif ways == ["stages"]:
            _check_positive("stages", self.stages)
        elif ways == ["balance"]:
            if isinstance(self.balance, str) or not isinstance(self.balance, Sequence) or not self.balance:
                raise PlanError(
                    f"balance={self.balance!r} is not a list of unit counts",
                    remedy="balance=[2, 2], one count a stage",
                )
            for i, count in enumerate(self.balance):
                _check_positive(f"balance[{i}]", count)
            self._set("balance", tuple(self.balance))
        elif ways == ["cut"]:
            if not isinstance(self.cut, list | tuple) or not all(
                isinstance(p, str) and p for p in self.cut or [""]
            ):
                raise PlanError(
                    f"cut={self.cut!r} is not a list of module paths",
                    remedy='cut=["h.4", "h.8"]: each path begins a new stage',
                )
            repeated = [p for i, p in enumerate(self.cut or ()) if p in (self.cut or ())[:i]]
            if repeated:
                raise PlanError(f"cut= names {repeated[0]!r} twice", remedy="name each path once")
            self._set("cut", tuple(self.cut or ()))
        else:
            self._check_device_map()

    def _check_device_map(self) -> None:
        if self.devices is not None:
            raise PlanError(
                "device_map= and devices= both say where to place",
                remedy='keep device_map= alone; the devices of a word such as "auto" are the keys of max_memory='
                if isinstance(self.device_map, str)
                else "keep device_map= alone, it names the devices",
            )
        self._set("device_map", device_map_of(self.device_map))

    def _check_offload(self) -> None:
        if not isinstance(self.offload, bool):
            raise PlanError(f"offload={self.offload!r} is not True or False", remedy="offload=True")
        others = {
            "max_memory": self.max_memory is not None,
            "replicas": self.replicas != 1,
            "sync_batch_norm": self.sync_batch_norm,
            "deferred_batch_norm": self.deferred_batch_norm,
        }
        for name in (name for name, is_set in others.items() if self.offload and is_set):
            raise PlanError(
                f"offload=True keeps parameters on the CPU, and {name}={getattr(self, name)!r} wants them on their devices",
                remedy=f"leave out {name}=, or offload=",
            )

    def _check_no_split(self) -> None:
        given = self.no_split_module_classes
        listed = given if isinstance(given, list | tuple) else [given]
        if not all((isinstance(c, str) and c) or isinstance(c, type) for c in listed):
            raise PlanError(
                f"no_split_module_classes={given!r} is not a list of classes",
                remedy='no_split_module_classes=["Block"]: names of classes, or classes',
            )
        if not isinstance(self.device_map, str):
            raise PlanError(
                "no_split_module_classes= says what a word may not split, but "
                + ("device_map= names the modules" if self.device_map else "device_map= is not set"),
                remedy='device_map="auto", or leave out no_split_module_classes=',
            )
        names = tuple(c.__name__ if isinstance(c, type) else c for c in listed)
        self._set("no_split_module_classes", names)

    def _check_schedule(self) -> None:
        if isinstance(self.schedule, Schedule):
            self._check_own_schedule(self.schedule)
        elif not isinstance(self.schedule, str):
            raise PlanError(
                f"schedule={self.schedule!r} is no schedule",
                remedy=f"one of {', '.join(NAMES)}, or fxsplit.Schedule.from_csv(text)",
            )
        else:
            self._check_choice("schedule", NAMES)
        if self.schedule in SHARED:
            self._check_shared(str(self.schedule))
        elif self.workers is not None:
            raise PlanError(
                f"workers={self.workers} shares stages out, but "
                + ("schedule= lists its own workers" if isinstance(self.schedule, Schedule) else "")
                + (
                    f"schedule={self.schedule!r} has a worker for each stage" * isinstance(self.schedule, str)
                ),
                remedy=f"one of {', '.join(SHARED)}, or leave out workers=",
            )

    def _check_shared(self, name: str) -> None:
        """Stages that share workers."""
        stages = self.stage_count()
        if self.workers is None and isinstance(self.devices, list | tuple):
            self._set("workers", self._workers_of_devices(name, self.devices))
        if self.workers is None:
            raise PlanError(
                f"schedule={name!r} has several stages on each worker, but workers= is not set",
                remedy=f"workers={usual_workers(name, stages or 4)}",
            )
        _check_positive("workers", self.workers)
        if name in IN_V and self.replicas == "auto":
            raise PlanError(
                f'replicas="auto" may pick any number of stages, but schedule={name!r} plays {2 * self.workers}',
                remedy="the number of replicas: replicas=1, or schedule='gpipe' without workers=",
            )
        if stages is not None:
            self._share_devices(name, stages, self.workers)

    def _workers_of_devices(self, name: str, devices: Sequence[object]) -> int:
        """A list has one for each worker, unless it has one for each stage."""
        if len(devices) != self.stage_count():
            return len(devices)
        return usual_workers(name, len(devices)) if name in IN_V else len(set(map(str, devices)))

    def _check_own_schedule(self, own: Schedule) -> None:
        if not any(a.kind != "F" for actions in own.workers for a in actions):
            raise PlanError(
                f"schedule= {own.name!r} never goes backward",
                remedy="pipe(x) under no_grad goes forward only anyway",
            )
        stages = self.stage_count()
        if stages is not None and stages != own.stages:
            raise PlanError(
                f"{self.ways_to_cut()[0]}= asks for {stages} stages, but schedule= plays {own.stages}",
                remedy=f"stages={own.stages}, or a schedule for {stages}",
            )
        if self.micro_batches != own.micro_batches:
            raise PlanError(
                f"micro_batches={self.micro_batches}, but schedule= plays {own.micro_batches}",
                remedy=f"micro_batches={own.micro_batches}",
            )
        if self.replicas != 1:
            raise PlanError(
                f"replicas={self.replicas!r}, but schedule= lists its own workers",
                remedy="micro-batches of one stage on several workers in the schedule itself, or leave out replicas=",
            )

    def _share_devices(self, name: str, stages: int, workers: int) -> None:
        """A list of one device for each worker becomes one for each stage."""
        if not self.plays(stages):
            follows = "workers" not in self.__dict__["_asked"] and stages % 2 == 0
            raise PlanError(
                f"{self.ways_to_cut()[0]}= asks for {stages} stages, but schedule={name!r} has two on each of {workers} workers",
                remedy=f"list {stages // 2} devices, one for each worker"
                if follows
                else fits_a_v(stages, workers),
            )
        if isinstance(self.devices, list | tuple) and len(self.devices) == workers:
            worker_of = schedule_of(name, stages, 1, workers).worker_of
            self._set("devices", [self.devices[w] for w in worker_of])

    def _check_cost(self) -> None:
        self._set("cost", Cost.of(self.cost))
        states = self.optimizer_states
        if states is not None and (not isinstance(states, int) or isinstance(states, bool) or states < 0):
            raise PlanError(
                f"optimizer_states={states!r} is not a number of values for each parameter",
                remedy="2 for Adam, 0 for SGD, None for inference",
            )

    def _check_replicas(self) -> None:
        value = self.replicas
        if isinstance(value, str):
            self._check_choice("replicas", ("auto",))
            if not isinstance(self.devices, tuple):
                raise PlanError(
                    'replicas="auto" shares a list of devices out, and devices= is none',
                    remedy='devices=["cpu"] * 4',
                )
            if self.ways_to_cut() not in ([], ["stages"]):
                raise PlanError(
                    f'replicas="auto" cuts by itself, but {self.ways_to_cut()[0]}= says where to cut',
                    remedy=f"leave out {self.ways_to_cut()[0]}=, or give the numbers: replicas=[2, 1]",
                )
        elif isinstance(value, list | tuple):
            for i, count in enumerate(value):
                _check_positive(f"replicas[{i}]", count)
            stages = self.stage_count()
            if stages is not None and stages != len(value):
                raise PlanError(
                    f"{self.ways_to_cut()[0]}= asks for {stages} stages, but replicas= lists {len(value)}",
                    remedy=f"list {stages} numbers, or a single one for all",
                )
            self._set("replicas", tuple(value))
        else:
            _check_positive("replicas", value)

    def _enough_micro_batches(self) -> int:
        """So many that all replicas of a stage get equally many."""
        if self.replicas == "auto":
            return len(self.devices) if isinstance(self.devices, tuple) else 1
        return self.replicas if isinstance(self.replicas, int) else math.lcm(*map(int, self.replicas))

    def _check_batch_norm(self) -> None:
        for field in ("deferred_batch_norm", "sync_batch_norm"):
            if not isinstance(getattr(self, field), bool):
                raise PlanError(f"{field}={getattr(self, field)!r} is not True or False", remedy="True")
        if self.sync_batch_norm and self.deferred_batch_norm:
            raise PlanError(
                "sync_batch_norm= and deferred_batch_norm= are both set, and the first does what the second does",
                remedy="leave out deferred_batch_norm=",
            )
        if self.sync_batch_norm and self.schedule != "gpipe":
            raise PlanError(
                f"sync_batch_norm= lets all micro-batches meet, but schedule={self.schedule_name!r} goes backward with "
                "some before others have gone forward, or has one worker for several stages",
                remedy='schedule="gpipe", or deferred_batch_norm=True',
            )

    def row_of(self, stage: int) -> tuple[str, ...] | None:
        """The devices of the replicas of a stage, where the plan lists them one by one."""
        row = self.devices[stage] if isinstance(self.devices, tuple) else None
        return row if isinstance(row, tuple) else None

    def _check_hardware(self) -> None:
        value = self.hardware
        if isinstance(value, list | tuple):
            devices = tuple(described(f"hardware[{i}]", one) for i, one in enumerate(value))
            stages = len(self.devices) if self.replicas == "auto" else self.stage_count()  # type: ignore[arg-type]
            if stages is not None and stages != len(devices):
                raise PlanError(
                    f"the plan has {stages} stages or devices, but hardware= lists {len(devices)}",
                    remedy=f"describe {stages} of them, or one for all",
                )
            self._set("hardware", devices)
        elif value is not None:
            self._set("hardware", described("hardware", value))
        if self.weighing.rates and any(d.flops is None or d.bandwidth is None for d in self.described()):
            raise PlanError(
                f'cost="{self.weighing.name}" needs the rate and the bandwidth of the device',
                remedy='hardware="A100-80GB", or hardware=fxsplit.Device(flops=1e14, bandwidth=1e12)',
            )

    def described(self) -> tuple[Device, ...]:
        """The descriptions: one for all stages, one for each, or an empty one if nothing is described."""
        if isinstance(self.hardware, tuple):
            return self.hardware
        return (self.hardware if isinstance(self.hardware, Device) else Device(),)

    def _check_devices(self) -> None:
        if isinstance(self.devices, DeviceLike):
            self._set("devices", device_name("devices", self.devices))
            return
        if not isinstance(self.devices, Sequence) or not self.devices:
            raise PlanError(
                f"devices={self.devices!r} is not a device or a list of devices", remedy='devices=["cuda:0"]'
            )
        devices = tuple(_device_or_row(f"devices[{i}]", d) for i, d in enumerate(self.devices))
        self._set("devices", devices)
        if any(isinstance(d, tuple) for d in devices):
            self._count_rows(devices)
        if self.replicas == "auto":
            if (self.stages or 1) > len(devices):
                raise PlanError(
                    f"stages={self.stages}, but devices= lists {len(devices)}", remedy="list more devices"
                )
            return
        field, count = self.ways_to_cut()[0], self.stage_count()
        if count is not None and count != len(devices):
            r = self.replicas if isinstance(self.replicas, int) else 1
            rows = [list(devices[s * r : s * r + r]) for s in range(count)]
            raise PlanError(
                f"{field}= asks for {count} stages, but devices= lists {len(devices)}",
                remedy=f"a row for the replicas of each stage: devices={rows}"
                if r > 1 and len(devices) == count * r
                else f"list {count} devices (one may appear several times), or a single device",
            )

    def _count_rows(self, devices: tuple[str | tuple[str, ...], ...]) -> None:
        """The rows say how many replicas there are."""
        counts = tuple(len(row) if isinstance(row, tuple) else 1 for row in devices)
        if self.replicas == 1:
            self._set("replicas", counts)
        elif self.replicas == "auto":
            raise PlanError(
                'replicas="auto" shares devices out, but devices= has rows, which do so already',
                remedy="leave out replicas=, or list the devices without rows",
            )
        for stage, count in enumerate(counts):
            said = (
                self.replicas if isinstance(self.replicas, int) else dict(enumerate(self.replicas)).get(stage)
            )
            if said != count and not (count == 1 and not isinstance(devices[stage], tuple)):
                raise PlanError(
                    f"devices[{stage}]= is a row of {count}, but replicas= says {said}",
                    remedy="leave out replicas=: the rows say it",
                )

    def _check_batch_dims(self) -> None:
        if not isinstance(self.batch_dims, Mapping) or not all(
            isinstance(k, str) and (v is None or (isinstance(v, int) and not isinstance(v, bool) and v >= 0))
            for k, v in self.batch_dims.items()
        ):
            raise PlanError(
                f"batch_dims={self.batch_dims!r} is not a mapping of argument names to dimensions (0, 1, … or None)",
                remedy='batch_dims={"mask": None, "hidden": 1}',
            )
        self._set("batch_dims", dict(self.batch_dims))

    def _check_choice(self, field: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if value not in choices:
            raise PlanError(
                f"{field}={value!r} is not known", remedy=did_you_mean(str(value), choices, label="choices")
            )

    @property
    def weighing(self) -> Cost:
        """The cost, which answers what a node adds to the load of its stage."""
        return Cost.of(self.cost)

    @property
    def recomputation(self) -> Checkpoint:
        """The checkpoint policy, which answers what is computed again."""
        return Checkpoint.of(self.checkpoint)

    @property
    def loss_inside(self) -> bool:
        """Whether a step computes the loss for each micro-batch: some go backward before all have gone forward."""
        chosen = self.schedule
        workers = 1 if chosen in IN_V else self.workers  # a V of any number of workers is like that of one
        found = schedule_of(chosen, 2, 2, workers) if isinstance(chosen, str) else chosen
        return not found.forward_first

    def plays(self, stages: int) -> bool:
        """Whether its schedule can play so many stages."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.stages == stages
        return self.schedule not in IN_V or stages == 2 * (self.workers or 1)

    def schedule_for(
        self, stages: int, micro_batches: int, replicas: Sequence[int] | None = None
    ) -> Schedule:
        """The schedule for so many stages and micro-batches; see `schedules.catalog.schedule_of`."""
        return schedule_of(self.schedule, stages, micro_batches, self.workers, replicas)

    @property
    def _of_any_number(self) -> str:
        """Its schedule, or where that is for one number of stages a like one for any."""
        if isinstance(self.schedule, Schedule):
            return "gpipe"
        return "interleaved_zero_bubble" if self.schedule in IN_V else self.schedule

    @property
    def schedule_name(self) -> str:
        """Of a schedule by name, or of one of the user's own."""
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name

    def stage_count(self) -> int | None:
        """The number of stages, where the plan alone decides it."""
        if self.stages is not None:
            return self.stages
        if self.balance is not None:
            return len(self.balance)
        return len(self.cut) + 1 if self.cut is not None else None

    def replace(self, **changes: Any) -> Plan:
        """This plan with some fields changed."""
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise PlanError(f"Plan has no field {name!r}", remedy=did_you_mean(name, known))
        asked: dict[str, Any] = self.__dict__["_asked"]  # and what follows from it follows anew
        rows = isinstance(self.devices, tuple) and any(isinstance(row, tuple) for row in self.devices)
        if rows and isinstance(
            changes.get("devices"), DeviceLike
        ):  # the rows said how many replicas, and still do
            changes = {"replicas": self.replicas, **changes}
        return type(self)(**{**asked, **changes})

    def placed(self, device_map: Mapping[str, Any]) -> Plan:
        """This plan with a device map, and without what counts the stages of another cut or names its nodes."""
        return self.replace(
            stages=None,
            balance=None,
            cut=None,
            devices=None,
            device_map=device_map,
            max_memory=None,
            no_split_module_classes=None,
            hardware=None,
            cost="params",
            schedule=self._of_any_number,
            workers=self.workers,
            replicas=self.replicas if isinstance(self.replicas, int) else 1,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values: what `from_dict` and JSON take."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if "micro_batches" not in self.__dict__["_asked"]:
            del fields["micro_batches"]  # it follows from the rest
        return plain_fields(fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The plan with these fields; an unknown name is an error."""
        if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
            raise PlanError(f"{fields!r} is no dict of fields", remedy="what plan.to_dict() gives")
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise PlanError(f"Plan has no field {name!r}", remedy=did_you_mean(name, known))
        return cls(**fields_of(fields))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a JSON file."""
        write_fields(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan from a JSON file; nothing in it is executed."""
        return cls.from_dict(read_fields(path))

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)
        usual = {f.name: f.default for f in fields} | {"micro_batches": self._enough_micro_batches()}
        shown = [f"{n}={getattr(self, n)!r}" for n, default in usual.items() if getattr(self, n) != default]
        return f"Plan({', '.join(shown)})"


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Plan)}
Plan.__init__ = explained(  # type: ignore[method-assign]
    PlanError, "fxsplit.Plan(stages=2, micro_batches=8)", PLAN_SPELLINGS
)(Plan.__init__)


def _kept(value: Any) -> Any:
    """A list or mapping as it is now: its owner may change it."""
    if isinstance(value, list | tuple):
        return tuple(map(_kept, value))
    return dict(value) if isinstance(value, Mapping) else value


def _is_left_out(value: object) -> bool:
    return value is None


def _device_or_row(where: str, value: object) -> str | tuple[str, ...]:
    if not isinstance(value, list | tuple):
        return device_name(where, value)
    if not value:
        raise PlanError(f"{where} is an empty row", remedy='a device for each replica: ["cuda:0", "cuda:1"]')
    return tuple(device_name(f"{where}[{i}]", d) for i, d in enumerate(value))


def _check_positive(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{field}={value!r} is not a positive whole number", remedy=f"{field}=1 or more")
