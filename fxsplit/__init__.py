"""fxsplit: split an unchanged PyTorch model into readable pipeline stages, and prove that the split is the model."""

from . import errors, testing
from .batch.scattered import Scattered
from .compiler import Preview, compile, preview
from .cost.link import measure_link
from .graph.ir import Assignment, Program, Stage, Traced
from .loading import load
from .loss.criterion import Criterion
from .modules.callbacks import ReplicationContext, on_replicate
from .pipeline import Pipeline, verify
from .plan.checkpoint import Budget
from .plan.costs import NodeCost
from .plan.hardware import ACCELERATORS, Device
from .plan.plan import Plan
from .runtime.events import ActionEvent
from .schedules.schedule import Action, Schedule
from .simulation.costs import StageCosts
from .simulation.profile import Profile, profile
from .simulation.simulate import Simulation, simulate
from .timeline.timeline import Timeline

__version__ = "0.1.0"
__all__ = [
    "ACCELERATORS",
    "Action",
    "ActionEvent",
    "Assignment",
    "Budget",
    "Criterion",
    "Device",
    "NodeCost",
    "Pipeline",
    "Plan",
    "Preview",
    "Profile",
    "Program",
    "ReplicationContext",
    "Scattered",
    "Schedule",
    "Simulation",
    "Stage",
    "StageCosts",
    "Timeline",
    "Traced",
    "compile",
    "errors",
    "load",
    "measure_link",
    "on_replicate",
    "preview",
    "profile",
    "simulate",
    "testing",
    "verify",
]
