"""fxsplit: split an unchanged PyTorch model into readable pipeline stages, and prove that the split is the model."""

from . import errors, testing
from .actions import Action, Schedule
from .checkpoint import Budget
from .compiler import Preview, compile, preview
from .cost.link import measure_link
from .costs import NodeCost
from .hardware import ACCELERATORS, Device
from .ir import Assignment, Program, Stage, Traced
from .loading import load
from .plan import Plan
from .replicate.criterion import Criterion
from .replicate.scattered import Scattered
from .replication import ReplicationContext, on_replicate
from .runtime.events import ActionEvent
from .runtime.pipeline import Pipeline, verify

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
    "Program",
    "ReplicationContext",
    "Scattered",
    "Schedule",
    "Stage",
    "Traced",
    "compile",
    "errors",
    "load",
    "measure_link",
    "on_replicate",
    "preview",
    "testing",
    "verify",
]
