"""A captured model and the loads of any cut of it, by definition: added up from the graph, and not by the planner."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import fxsplit
from fxsplit.graph.nodes import compute_nodes
from fxsplit.partition.assign import weigh_nodes
from fxsplit.partition.model import build_problem
from fxsplit.partition.units import find_units
from fxsplit.trace.front import TRACING, trace

STAGES, LINKS = (2, 4, 8), (200e9, 20e9)
MICRO_BATCHES = 8


class Captured:
    """A captured model with the work of its nodes, and a problem for each number of stages and link."""

    def __init__(self, factory):
        with torch.device("meta"):
            self.model, kwargs = factory()
        self.model.train()
        with TRACING, torch.inference_mode(False), torch.enable_grad():
            self.traced = trace(self.model, (), kwargs, check=False)
            inputs = self.traced.signature.flatten((), kwargs)
            self.units = find_units(self.traced)
            self.figures = weigh_nodes(self.model, self.traced, self.plan(2, LINKS[0]), self.units, inputs)
        nodes = compute_nodes(self.traced.graph)
        self.unit_of = {nodes[i].name: u for u, x in enumerate(self.units) for i in range(x.start, x.end)}
        self.work = np.zeros(len(self.units))
        for name, unit in self.unit_of.items():
            self.work[unit] += self.figures.works[0][name]
        self.values = []  # the units that touch a value, the one that makes it first; and its bytes
        for node in nodes:
            home = self.unit_of[node.name]
            reading = {self.unit_of[user.name] for user in node.users if user.name in self.unit_of} - {home}
            if reading:
                self.values.append(((home, *sorted(reading)), self.nbytes(node)))

    def nbytes(self, node):
        """Bytes of the tensors that a node returns."""
        leaves = tree_leaves(self.traced.facts[node.name].value)
        tensors = [leaf for leaf in leaves if hasattr(leaf, "shape")]
        return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)

    def plan(self, stages, link):
        """A plan on described devices."""
        device = fxsplit.Device(flops=312e12, bandwidth=2039e9, link=link)
        return fxsplit.Plan(stages=stages, cost="roofline", hardware=device, micro_batches=MICRO_BATCHES)

    def problem(self, stages, link):
        """What the planner sees."""
        plan = self.plan(stages, link)
        return build_problem(self.model, self.traced, plan, self.figures, ["meta"] * stages)

    def loads(self, stage_of, stages, link):
        """The load of each stage, from the graph; `stage_of` is by unit."""
        found = [0.0] * stages
        for node in compute_nodes(self.traced.graph):
            home = stage_of[self.unit_of[node.name]]
            found[home] += self.figures.works[0][node.name]
            readers = [user.name for user in node.users if user.name in self.unit_of]
            elsewhere = {stage_of[self.unit_of[name]] for name in readers} - {home}
            for stage in (*elsewhere, *([home] if elsewhere else [])):
                found[stage] += self.nbytes(node) / link
        return found

    def parameters(self):
        """Bytes of parameters of each unit, each at its first reader."""
        sizes = {name: p.numel() * p.element_size() for name, p in self.model.named_parameters()}
        found, seen = np.zeros(len(self.units)), set()
        for node in compute_nodes(self.traced.graph):
            for name in self.traced.facts[node.name].parameters:
                if name not in seen:
                    found[self.unit_of[node.name]] += sizes[name]
                    seen.add(name)
        return found
