"""How good and how fast are the stages that fxsplit chooses, and what do others choose?

    python benchmarks/partition.py quality [--seconds 15] [--certify 20] [--jobs 1] [models ...]
    python benchmarks/partition.py towers [models ...]
    python benchmarks/partition.py speed [--units 100,1000,10000,50000]

Models have random weights and are on the meta device; one whose library is not installed is left out. Work is the
roofline's on an A100, for forward and backward of one training batch. Each model is tried in a process of its own with
one thread. Needs numpy and tabulate; scipy to certify, and torchgpipe to compare with its block partition.

``quality``: the heaviest load for k = 2, 4, 8 and links of 200 and 20 GB/s, by methods that all choose among the same
units, each as a ratio to the best that anything found. A load is work and the distinct bytes in and out by the link,
added up here from the graph. The methods: fxsplit, and with effort="search"; the lightest cut in program order;
torchgpipe's block partition of the times; as many units in each stage; the lightest in parameters (as DeepSpeed does) and
in time alone, both exact over program order. Beyond them `--seconds` are spent on a search that neither keeps to an
order nor to a time that anyone would wait: annealing of single units, and exact cuts of many orders. HiGHS then looks for
any better assignment of single units to stages for `--certify` seconds. "certified" says that there is none that is
0.01 % better; otherwise the column says how far below the best its bound is.

``towers``: simulated seconds of a step of 8 micro-batches, fxsplit's cut against the lightest in program order.

``speed``: seconds that planning takes for synthetic programs, k = 8 and 20 GB/s, median of 5; the last row with
`build_problem` from a captured graph.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import random
import statistics
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import fxsplit
from fxsplit.graph.nodes import compute_nodes
from fxsplit.partition.assign import weigh_nodes
from fxsplit.partition.explain import simulator
from fxsplit.partition.model import build_problem, stage_nodes
from fxsplit.partition.planner import plan_stages
from fxsplit.partition.problem import Cut, Item, Problem, Slot, Weights, figures, travels
from fxsplit.partition.units import find_units
from fxsplit.trace.front import TRACING, trace

STAGES, LINKS = (2, 4, 8), (200e9, 20e9)
MICRO_BATCHES = 8
CLOSE = 1e-4  # what "certified" allows
METHODS = ("fxsplit", "search", "in order", "torchgpipe", "units", "parameters", "time")


# Models ---------------------------------------------------------------------------------------------------------------


def tokens(batch, length):
    """Token ids; on the meta device they have no values."""
    return torch.zeros(batch, length, dtype=torch.long)


def gpt2_medium():
    """GPT-2 medium; the mask is given, because one cannot be made of values that are not there."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False))
    mask = torch.ones(8, 1, 1024, 1024, dtype=torch.bool)
    return model, {"input_ids": tokens(8, 1024), "attention_mask": mask}


def t5_base():
    """T5 base: encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768, d_ff=3072, num_layers=12, num_decoder_layers=12, num_heads=12, use_cache=False
    )
    return T5ForConditionalGeneration(config), {
        "input_ids": tokens(16, 512),
        "decoder_input_ids": tokens(16, 128),
    }


def clip_l14():
    """CLIP ViT-L/14: a tower for text and one for images."""
    from transformers import CLIPConfig, CLIPModel

    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
    }
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=768))
    return model, {"input_ids": tokens(64, 77), "pixel_values": torch.zeros(64, 3, 224, 224)}


def inception_v3():
    """Inception v3, with its auxiliary output."""
    from torchvision import models

    return models.inception_v3(weights=None, init_weights=False), {"x": torch.zeros(32, 3, 299, 299)}


def densenet201():
    """DenseNet-201."""
    from torchvision import models

    return models.densenet201(), {"x": torch.zeros(32, 3, 224, 224)}


def stable_diffusion():
    """The U-Net of Stable Diffusion 1.5."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    inputs = {"sample": torch.zeros(8, 4, 64, 64), "timestep": torch.zeros(8, dtype=torch.long)}
    return model, {**inputs, "encoder_hidden_states": torch.zeros(8, 77, 768)}


class UNet(nn.Module):
    """A plain U-Net (Ronneberger et al., 2015) with batch norm."""

    def __init__(self, widths=(64, 128, 256, 512, 1024)):
        super().__init__()
        self.down = nn.ModuleList([self.block(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True)])
        pairs = list(zip(reversed(widths[1:]), reversed(widths[:-1]), strict=True))
        self.widen = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs])
        self.up = nn.ModuleList([self.block(2 * b, b) for _, b in pairs])
        self.last = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def block(a, b):
        """Two convolutions."""
        return nn.Sequential(
            *(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()),
            *(nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()),
        )

    def forward(self, x):
        """Down with each result kept, and up again."""
        kept = []
        for i, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for widen, block, skip in zip(self.widen, self.up, reversed(kept[:-1]), strict=True):
            x = block(torch.cat([skip, widen(x)], 1))
        return self.last(x)


class Towers(nn.Module):
    """Two stacks of residual blocks of unlike widths that meet at the end."""

    def __init__(self, widths=(1024, 1536), depths=(16, 12)):
        super().__init__()
        self.first, self.second = (
            nn.ModuleList([self.block(w) for _ in range(d)]) for w, d in zip(widths, depths, strict=True)
        )
        self.heads = nn.ModuleList([nn.Linear(w, 256) for w in widths])

    @staticmethod
    def block(width):
        """What a transformer has after its attention."""
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, y):
        """Similarities of the rows of x and y."""
        for block in self.first:
            x = x + block(x)
        for block in self.second:
            y = y + block(y)
        return self.heads[0](x.mean(1)) @ self.heads[1](y.mean(1)).T


def towers():
    """Two synthetic towers."""
    return Towers(), {"x": torch.zeros(32, 256, 1024), "y": torch.zeros(32, 256, 1536)}


MODELS = {
    "gpt2-medium": ("transformers", gpt2_medium),
    "t5-base": ("transformers", t5_base),
    "clip-l14": ("transformers", clip_l14),
    "inception-v3": ("torchvision", inception_v3),
    "densenet201": ("torchvision", densenet201),
    "unet": ("torch", lambda: (UNet(), {"x": torch.zeros(8, 3, 256, 256)})),
    "sd15-unet": ("diffusers", stable_diffusion),
}
TOWERS = {"clip-l14": MODELS["clip-l14"], "t5-base": MODELS["t5-base"], "towers": ("torch", towers)}


# A captured model and its loads, by definition ------------------------------------------------------------------------


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


class Orders:
    """Exact cuts of any order of one problem: all intervals at once, with numpy."""

    def __init__(self, work, values, link):
        self.work, self.count = np.asarray(work), len(work)
        self.number = np.repeat(np.arange(len(values)), [len(units) for units, _ in values])
        self.units = np.array([u for units, _ in values for u in units], dtype=int)
        self.seconds = np.array([nbytes / link for _, nbytes in values])

    def loads(self, order):
        """Entry [a, b]: the load of the units at positions a to b; infinite where there are none."""
        n = self.count
        sums = np.concatenate([[0.0], np.cumsum(self.work[order])])
        found = sums[None, :] - sums[:, None]
        if len(self.seconds):
            where = np.empty(n, dtype=int)
            where[order] = np.arange(n)
            places = where[self.units]
            by_place = np.lexsort((places, self.number))
            places, number = places[by_place], self.number[by_place]
            first = np.r_[True, number[1:] != number[:-1]]
            previous = np.where(first, -1, np.r_[-1, places[:-1]])
            begin, end = places[first], places[np.r_[first[1:], True]]
            each = self.seconds[number]
            # An interval touches a value whose first place in it is p: previous < a <= p < b. It does not count
            # where all places are inside.
            rows = np.concatenate([previous + 1, places + 1, np.zeros_like(begin), begin + 1])
            columns = np.concatenate([places + 1, places + 1, end + 1, end + 1])
            weights = np.concatenate([each, -each, -self.seconds, self.seconds])
            change = np.bincount(rows * (n + 1) + columns, weights, minlength=(n + 1) ** 2)
            found += change.reshape(n + 1, n + 1).cumsum(0).cumsum(1)
        found[np.tri(n + 1, dtype=bool)] = np.inf
        return found

    def lightest(self, order, stages):
        """The lightest heaviest load of this order, and unit → stage."""
        loads = self.loads(order)
        rows = [loads[0]]
        for _ in range(stages - 1):
            rows.append(np.maximum(rows[-1][:, None], loads).min(0))
        starts, at = [], self.count
        for row in reversed(rows[:-1]):
            at = int(np.maximum(row, loads[:, at]).argmin())
            starts.append(at)
        return rows[-1][-1], spread(order, [0, *reversed(starts)])


def spread(order, starts):
    """Unit → stage, for stages that begin at these places of an order."""
    found = np.zeros(len(order), dtype=int)
    for stage, start in enumerate(starts):
        found[order[start:]] = stage
    return found


# What else there is ---------------------------------------------------------------------------------------------------


def block_partition(work, stages):
    """torchgpipe's, of the times; None where it is not installed or finds none."""
    try:
        from torchgpipe.balance import blockpartition
    except ImportError:
        return None
    counts = [len(block) for block in blockpartition.solve(list(work), stages)]
    return None if 0 in counts else spread(np.arange(len(work)), np.cumsum([0, *counts[:-1]]))


class Annealing:
    """Units that move between stages one at a time, whatever the order."""

    def __init__(self, work, values, before, link, stages, seed):
        self.work, self.values, self.before, self.stages = [float(w) for w in work], values, before, stages
        self.seconds = [nbytes / link for _, nbytes in values]
        self.after = [[] for _ in before]
        for unit, earlier in enumerate(before):
            for other in earlier:
                self.after[other].append(unit)
        self.touching = [[] for _ in before]
        for number, (units, _) in enumerate(values):
            for unit in units:
                self.touching[unit].append(number)
        self.random = random.Random(seed)

    def run(self, start, moves, heat):
        """The best unit → stage that is met."""
        stage_of, choose, last = [int(s) for s in start], self.random, self.stages - 1
        counts = [[0] * self.stages for _ in self.values]
        for number, (units, _) in enumerate(self.values):
            for unit in units:
                counts[number][stage_of[unit]] += 1
        loads = [0.0] * self.stages
        for unit, stage in enumerate(stage_of):
            loads[stage] += self.work[unit]
        for number, row in enumerate(counts):
            if sum(map(bool, row)) > 1:
                for stage, count in enumerate(row):
                    loads[stage] += self.seconds[number] * bool(count)
        scale = max(loads)
        members = [stage_of.count(stage) for stage in range(self.stages)]
        energy = sum((load / scale) ** 16 for load in loads)
        best, found = max(loads), list(stage_of)
        for move in range(moves):
            unit = choose.randrange(len(stage_of))
            here = stage_of[unit]
            low = max((stage_of[u] for u in self.before[unit]), default=0)
            high = min((stage_of[u] for u in self.after[unit]), default=last)
            if low == high or members[here] == 1:
                continue
            there = choose.randint(low, high)
            if there == here:
                continue
            changed = loads[:]
            changed[here] -= self.work[unit]
            changed[there] += self.work[unit]
            for number in self.touching[unit]:
                row, seconds = counts[number], self.seconds[number]
                size = len(self.values[number][0])
                if row[here] < size:  # it has left that stage's side of a cut before
                    for stage in range(self.stages):
                        changed[stage] -= seconds * bool(row[stage])
                row[here] -= 1
                row[there] += 1
                if row[there] < size:
                    for stage in range(self.stages):
                        changed[stage] += seconds * bool(row[stage])
            then = sum((load / scale) ** 16 for load in changed)
            warmth = heat * energy * (1 - move / moves) ** 2
            if then <= energy or (warmth and choose.random() < math.exp((energy - then) / warmth)):
                loads, energy = changed, then
                stage_of[unit] = there
                members[here] -= 1
                members[there] += 1
                if max(loads) < best * (1 - 1e-12):
                    best, found = max(loads), list(stage_of)
            else:
                for number in self.touching[unit]:
                    counts[number][here] += 1
                    counts[number][there] -= 1
        return np.array(found)


def random_order(before, after, choose):
    """An order that the program allows, often one branch after the other."""
    waiting = [len(earlier) for earlier in before]
    ready = [unit for unit, count in enumerate(waiting) if not count]
    stay, found = choose.choice((0.0, 0.5, 0.9, 1.0)), []
    while ready:
        at = len(ready) - 1 if choose.random() < stay else choose.randrange(len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        unit = ready.pop()
        found.append(unit)
        following = after[unit][:]
        choose.shuffle(following)
        for other in following:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return np.array(found)


def long_search(captured, orders, problem, stages, link, starts, seconds):
    """The best unit → stage that annealing and exact cuts of many orders find in that time."""
    annealing = Annealing(captured.work, captured.values, problem.before, link, stages, seed=1)
    best = min(starts, key=lambda pair: pair[0])
    until, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        start = best[1] if turn % 3 else starts[turn // 3 % len(starts)][1]
        if turn % 4 == 3:
            order = random_order(problem.before, annealing.after, annealing.random)
        else:
            stage_of = annealing.run(start, 40_000, heat=(0.2, 0.05, 0.01)[turn % 3])
            order = np.lexsort((np.arange(len(stage_of)), stage_of))
        found = orders.lightest(order, stages)
        best = min(best, found, key=lambda pair: pair[0])
        turn += 1
    return best


def certify(captured, problem, stages, link, best, seconds):
    """Is there an assignment of units to stages that is better by `CLOSE`? HiGHS, over all orders.

    y[u, s] says that unit u is in stage s or before; it grows with s and shrinks along every edge. t[v, s] is 1 if value v
    enters or leaves stage s: at least |x[reader, s] - x[home, s]| with x[u, s] = y[u, s] - y[u, s - 1].

    Returns the words for the table, a lower bound, and a better unit → stage or None.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError:
        return "no scipy", 0.0, None
    n, k, values = len(captured.work), stages, captured.values
    y, t, z = n * (k - 1), len(values) * k, n * (k - 1) + len(values) * k
    rows, columns, entries, upper = [], [], [], []

    def at_most(terms, limit):
        for column, factor in terms:
            rows.append(len(upper))
            columns.append(column)
            entries.append(factor)
        upper.append(limit)

    def inside(unit, stage, factor):
        """Terms of x[unit, stage], and its constant part."""
        terms = [(unit * (k - 1) + stage, factor)] if stage < k - 1 else []
        if stage:
            terms.append((unit * (k - 1) + stage - 1, -factor))
        return terms, factor * (stage == k - 1)

    for unit, earlier in enumerate(problem.before):
        for stage in range(k - 1):
            if stage:
                at_most([(unit * (k - 1) + stage - 1, 1), (unit * (k - 1) + stage, -1)], 0)
            for other in earlier:
                at_most([(unit * (k - 1) + stage, 1), (other * (k - 1) + stage, -1)], 0)
    for number, (units, _) in enumerate(values):
        for reader in units[1:]:
            for stage in range(k):
                for sign in (1, -1):
                    terms, constant = inside(reader, stage, sign)
                    more, other = inside(units[0], stage, -sign)
                    at_most([*terms, *more, (y + number * k + stage, -1)], -constant - other)
    for stage in range(k):  # in parts of the best load
        terms, limit = [(z, -1)], 0.0
        for unit, work in enumerate(captured.work):
            if work:
                more, constant = inside(unit, stage, work / best)
                terms += more
                limit -= constant
        terms += [(y + i * k + stage, nbytes / link / best) for i, (_, nbytes) in enumerate(values) if nbytes]
        at_most(terms, limit)
        more = [inside(unit, stage, -1.0) for unit in range(n)]  # no stage is empty
        at_most([term for terms, _ in more for term in terms], -1 - sum(c for _, c in more))
    below, above = np.zeros(z + 1), np.ones(z + 1)
    above[z] = 1 - CLOSE
    # What has to run before a unit, and after it, bounds its stage.
    for unit, (early, late) in enumerate(zip(*closures(problem.before, captured.work), strict=True)):
        for stage in range(k - 1):
            if early > (stage + 1) * best:
                above[unit * (k - 1) + stage] = 0
            if late > (k - 1 - stage) * best:
                below[unit * (k - 1) + stage] = 1
    cost = np.zeros(z + 1)
    cost[z] = 1
    matrix = csr_array((entries, (rows, columns)), shape=(len(upper), z + 1))
    result = milp(
        cost,
        integrality=np.r_[np.ones(y), np.zeros(t + 1)],
        bounds=Bounds(below, above),
        constraints=LinearConstraint(matrix, ub=np.array(upper)),
        options={"time_limit": seconds, "mip_rel_gap": CLOSE},
    )
    if result.status == 2:
        return "certified", best * (1 - CLOSE), None
    found = None
    if result.x is not None:
        found = (k - 1) - np.round(result.x[:y]).astype(int).reshape(n, k - 1).sum(1)
    bound = best * min(result.mip_dual_bound, 1 - CLOSE) if result.mip_dual_bound is not None else 0.0
    return ("certified" if result.status == 0 else "-"), bound, found


def closures(before, work):
    """Per unit the work of all that has to come before it, and after it, with its own."""
    after = [[] for _ in before]
    for unit, earlier in enumerate(before):
        for other in earlier:
            after[other].append(unit)
    found = []
    for edges, units in ((before, range(len(before))), (after, reversed(range(len(before))))):
        masks, totals = np.zeros((len(before), len(before)), dtype=bool), np.zeros(len(before))
        for unit in units:
            for other in edges[unit]:
                masks[unit] |= masks[other]
            masks[unit, unit] = True
            totals[unit] = masks[unit] @ work
        found.append(totals)
    return found


# Quality --------------------------------------------------------------------------------------------------------------


def quality_of(name, options):
    """One row for each number of stages and link, printed as JSON."""
    captured = Captured(MODELS[name][1])
    count = len(captured.units)
    parameters = captured.parameters()
    plain = np.arange(count)
    for link in LINKS:
        orders = Orders(captured.work, captured.values, link)
        timed, weighed = Orders(captured.work, [], link), Orders(parameters, [], link)
        for stages in STAGES:
            problem = captured.problem(stages, link)
            simulate = captured.plan(stages, link)
            took = []
            for _ in range(3):
                start = time.perf_counter()
                planned = plan_stages(problem, simulator(simulate))
                took.append(time.perf_counter() - start)
            start = time.perf_counter()
            searched = plan_stages(problem, simulator(simulate), search=True)
            long = time.perf_counter() - start
            block = block_partition(captured.work, stages)
            cuts = {
                "fxsplit": np.array(planned.cut.stage_of()),
                "search": np.array(searched.cut.stage_of()),
                "in order": orders.lightest(plain, stages)[1],
                **({"torchgpipe": block} if block is not None else {}),
                "units": spread(plain, [count * s // stages for s in range(stages)]),
                "parameters": weighed.lightest(plain, stages)[1],
                "time": timed.lightest(plain, stages)[1],
            }
            found = {method: max(captured.loads(cut, stages, link)) for method, cut in cuts.items()}
            assert math.isclose(found["fxsplit"], planned.bottleneck, rel_tol=1e-9)
            starts = [(found[method], cuts[method]) for method in found]
            best, cut = long_search(captured, orders, problem, stages, link, starts, options.seconds)
            best = max(captured.loads(cut, stages, link))
            source = "search here" if best < min(found.values()) * (1 - 1e-9) else "a method"
            word, bound = "-", 0.0
            until = time.perf_counter() + options.certify
            while (left := until - time.perf_counter()) > 1:  # again where it finds a better one
                word, bound, better = certify(captured, problem, stages, link, best, left)
                if better is None:
                    break
                best, source = min(best, max(captured.loads(better, stages, link))), "HiGHS"
            bound = max(bound, planned.bound)
            row = {
                "model": name,
                "k": stages,
                "link": link,
                "units": count,
                "best": best,
                "by": source,
                "ratios": {method: load / best for method, load in found.items()},
                "certified": word == "certified",
                "gap": 1 - bound / best,
                "seconds": statistics.median(took),
                "long": long,
                "order": planned.order,
                "tried": planned.tried,
                "exact": planned.exact,
            }
            print("ROW" + json.dumps(row), flush=True)


def quality(options):
    """The table, and the figures over all cases."""
    rows = in_processes("quality", MODELS, options)
    header = (
        "model",
        "k",
        "GB/s",
        "units",
        "best ms",
        *METHODS,
        "found by",
        "certified",
        "s",
        "s, search",
        "order",
    )
    show(
        header,
        [
            (
                *(r["model"], r["k"], f"{r['link'] / 1e9:.0f}", r["units"], f"{r['best'] * 1e3:.3f}"),
                *(f"{r['ratios'][m]:.4f}" if m in r["ratios"] else "-" for m in METHODS),
                *(r["by"], "yes" if r["certified"] else f"gap {r['gap']:.1%}"),
                *(f"{r['seconds']:.2f}", f"{r['long']:.2f}"),
                r["order"] + ("" if r["exact"] else " (thinned)"),
            )
            for r in rows
        ],
    )
    summary = []
    for method in METHODS:
        ratios = [r["ratios"][method] for r in rows if method in r["ratios"]]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            summary.append((method, len(ratios), f"{mean:.4f}", f"{max(ratios):.4f}"))
    show(("method", "cases", "geometric mean", "worst"), summary)
    if rows:
        print(f"certified: {sum(r['certified'] for r in rows)} of {len(rows)}")
        print(
            f"longest plan: {max(r['seconds'] for r in rows):.2f} s; with search {max(r['long'] for r in rows):.2f} s"
        )


# Towers ---------------------------------------------------------------------------------------------------------------


def towers_of(name, options):
    """Steps of two cuts."""
    captured = Captured(TOWERS[name][1])
    plain = np.arange(len(captured.units))
    for link in LINKS:
        orders = Orders(captured.work, captured.values, link)
        for stages in STAGES:
            problem, plan = captured.problem(stages, link), captured.plan(stages, link)
            planned = plan_stages(problem, simulator(plan))
            load, stage_of = orders.lightest(plain, stages)
            starts = tuple(int(np.searchsorted(stage_of, s)) for s in range(stages))
            cut = Cut(tuple(map(int, plain)), starts, planned.cut.slots)
            moving = travels(problem, cut)
            chains = list(dict.fromkeys((home, *readers) for home, readers, _ in moving))
            loads = [f.load for f in figures(problem, cut, moving)]
            step = simulator(plan)(loads, chains, [1] * stages)
            row = {
                "model": name,
                "k": stages,
                "link": link,
                "order": planned.order,
                "load": load,
                "planned load": planned.bottleneck,
                "step": step,
                "planned step": planned.step,
            }
            print("ROW" + json.dumps(row), flush=True)


def tower_table(options):
    """Steps of both, one row for each case."""
    rows = in_processes("towers", TOWERS, options)
    header = (
        "model",
        "k",
        "GB/s",
        "lightest ms",
        "fxsplit ms",
        "its step ms",
        "fxsplit's step ms",
        "shorter by",
        "order",
    )
    ms = ("load", "planned load", "step", "planned step")
    show(
        header,
        [
            (
                *(r["model"], r["k"], f"{r['link'] / 1e9:.0f}", *(f"{r[key] * 1e3:.3f}" for key in ms)),
                *(f"{1 - r['planned step'] / r['step']:.1%}", r["order"]),
            )
            for r in rows
        ],
    )


# Speed ----------------------------------------------------------------------------------------------------------------


class Program:
    """A synthetic program, unit by unit."""

    def __init__(self, seed=0):
        self.choose, self.reads = random.Random(seed), []

    def add(self, *reads):
        """A unit that reads the values of these; its number."""
        self.reads.append([r for r in reads if r is not None])
        return len(self.reads) - 1

    def problem(self, stages=8, link=20e9):
        """With random works and bytes."""
        count, choose = len(self.reads), self.choose
        readers = [[] for _ in range(count)]
        for unit, reads in enumerate(self.reads):
            for other in set(reads):
                readers[other].append(unit)
        work = tuple(choose.lognormvariate(-9, 1) for _ in range(count))
        values = tuple(
            Item((unit, *found), choose.choice((1e6, 4e6, 16e6)))
            for unit, found in enumerate(readers)
            if found
        )
        before = tuple(tuple(sorted(set(reads))) for reads in self.reads)
        slots = [Slot(0, Weights(work=1.0, traffic=1 / link), devices=(s,)) for s in range(stages)]
        moves = (*(((s + 1, slot),) for s, slot in enumerate(slots)), ())
        return Problem((work,), values, (), (), before, moves, (stages,))


def residual(program, units, x=None):
    """A chain with a residual connection around every five units."""
    while units > 0:
        kept = x = program.add(x) if x is None else x
        for _ in range(4):
            x = program.add(x)
        x = program.add(x, kept)
        units -= 5
    return x


def attention(program, units, x=None):
    """Blocks with three parallel branches."""
    x = program.add(x)
    for _ in range(max(1, units // 12)):
        norm = program.add(x)
        q, k, v = (program.add(program.add(norm)) for _ in range(3))
        x = program.add(x, program.add(program.add(program.add(q, k), v)))
        y = program.add(program.add(x))
        x = program.add(x, y)
    return x


def u_net(program, units):
    """A chain; each unit of the second half, in steps of four, reads one of the first half too."""
    x, kept = None, []
    for i in range(units // 2):
        x = program.add(x)
        if i % 4 == 0:
            kept.append(x)
    for i in range(units // 2):
        x = program.add(x, kept.pop() if i % 4 == 0 and kept else None)


def two_towers(program, units):
    """Two chains with residual connections, one after the other, that meet."""
    program.add(residual(program, units // 2), residual(program, units // 2))


def mixed_towers(program, units):
    """Two towers of attention whose second one reads the first one's result in places, as a decoder does."""
    first = attention(program, units // 2)
    x = None
    for _ in range(max(1, units // 200)):
        x = program.add(attention(program, 90, x), first)


PROGRAMS = {
    "residual": residual,
    "attention": attention,
    "U-Net": u_net,
    "two towers": two_towers,
    "encoder-decoder": mixed_towers,
}


class Deep(nn.Module):
    """As many residual blocks as it takes for a graph of that size."""

    def __init__(self, nodes):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(nodes // 3)])

    def forward(self, x):
        """Three nodes each."""
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def median_seconds(run, times=5):
    """The median of several runs, and the last result."""
    took = []
    for _ in range(times):
        gc.collect()
        start = time.perf_counter()
        result = run()
        took.append(time.perf_counter() - start)
    return statistics.median(took), result


def speed(options):
    """Seconds by program and size."""
    sizes = [int(size) for size in options.units.split(",")]
    rows = []
    for name, make in PROGRAMS.items():
        row = []
        for size in sizes:
            program = Program()
            make(program, size)
            problem = program.problem()
            plan = fxsplit.Plan(stages=8, micro_batches=MICRO_BATCHES)
            seconds, planned = median_seconds(lambda p=problem, q=plan: plan_stages(p, simulator(q)))
            row.append(
                f"{seconds:.3f}{'' if planned.exact else ' thinned'} ({planned.bottleneck / planned.bound:.3f})"
            )
        rows.append((name, *row))
        print(*rows[-1], sep="|", file=sys.stderr, flush=True)
    row = []
    for size in sizes:
        if size > 1000:  # its capture takes longer than all of the rest
            row.append("-")
            continue
        with torch.device("meta"):
            model, x = Deep(size), torch.zeros(4, 8)
        with TRACING, torch.inference_mode(False), torch.enable_grad():
            traced = trace(model, (x,), {}, check=False)
        works = {node.name: 1e-4 for node in compute_nodes(traced.graph)}
        plan = fxsplit.Plan(
            stages=8, cost=works, hardware=fxsplit.Device(link=20e9), micro_batches=MICRO_BATCHES
        )

        def both(model=model, traced=traced, plan=plan, x=x):
            units = find_units(traced)
            found = weigh_nodes(model, traced, plan, units, [x])
            problem = build_problem(model, traced, plan, found, ["meta"] * 8)
            start = time.perf_counter()
            planned = plan_stages(problem, simulator(plan))
            return time.perf_counter() - start, stage_nodes(traced, units, planned.cut)

        seconds, (alone, _) = median_seconds(both)
        row.append(f"{seconds:.3f}, of it plan_stages {alone:.3f}")
    rows.append(("captured, with build_problem", *row))
    show(("program", *(f"{size:,} units: s (load/bound)" for size in sizes)), rows)


# The command ----------------------------------------------------------------------------------------------------------


def in_processes(what, models, options):
    """The rows of each model, each in a process of its own."""
    chosen = {name: models[name] for name in options.models or models}
    for name, (library, _) in list(chosen.items()):
        if importlib.util.find_spec(library) is None:
            print(f"{name} is left out: {library} is not installed")
            del chosen[name]
    if what == "quality":
        for library, use in (("torchgpipe", "compare with it"), ("scipy", "certify")):
            if importlib.util.find_spec(library) is None:
                print(f"{library} is not installed, so as to {use}")

    def one(name):
        command = [sys.executable, __file__, what, "--one", name]
        command += ["--seconds", str(options.seconds), "--certify", str(options.certify)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            output, errors = process.communicate()
        if process.returncode:
            print(f"{name} is left out: {(errors.strip().splitlines() or ['crashed'])[-1][:200]}")
        print(f"{name} is done", file=sys.stderr, flush=True)
        return [json.loads(line[3:]) for line in output.splitlines() if line.startswith("ROW")]

    with ThreadPoolExecutor(options.jobs) as pool:
        return [row for rows in pool.map(one, chosen) for row in rows]


def show(header, rows):
    """A table."""
    from tabulate import tabulate

    print(tabulate(rows, headers=header, disable_numparse=True), end="\n\n", flush=True)


def main() -> None:
    """Run one of the parts."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["quality", "towers", "speed"])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--seconds", type=float, default=15, help="of search in each case")
    parser.add_argument("--certify", type=float, default=20, help="seconds that HiGHS has in each case")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--units", default="100,1000,10000,50000")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.one:
        (quality_of if options.part == "quality" else towers_of)(options.one, options)
    else:
        {"quality": quality, "towers": tower_table, "speed": speed}[options.part](options)


if __name__ == "__main__":
    main()
