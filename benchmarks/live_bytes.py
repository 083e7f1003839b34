"""Bytes of the tensors that a step made and that something still holds, whoever it is: autograd or a runtime."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes:
    """Counts in this process, from when it is made on.

    A dispatch mode in the calling thread and in every `threading.Thread` sees the results of all operations, those
    that recompute too; a weak reference to each storage sees its end. The model, its gradients, which are there before,
    and the batch are not counted. Temporaries inside of an operation are not seen.

    Attributes:
        activations: the most bytes at a time without gradients: without what operations of a backward formula made
            (they run in a graph task and without grad mode) and without tensors that are shaped like a parameter.
        all: the most bytes at a time of everything, with gradients.
    """

    def __init__(self):
        self.lock, self.live, self.known = threading.RLock(), {}, set()
        self.shapes, self.on = set(), False
        self.activations, self.all, self.now = 0, 0, [0, 0]
        counter = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                if counter.on:
                    counter._add(result)
                return result

        self._watch, run = Watch, threading.Thread.run

        def watched(thread):
            with Watch():
                run(thread)

        threading.Thread.run = watched

    def count(self, step: Callable[[], Any], model: nn.Module, *others: torch.Tensor) -> None:
        """Do a step and count; the model, its gradients and `others` are there before."""
        parameters = list(model.parameters())
        self.shapes = {shape for p in parameters for shape in (tuple(p.shape), tuple(p.shape)[::-1])}
        kept = [t.untyped_storage() for t in (*parameters, *(p.grad for p in parameters), *others)]
        self.known = {storage._cdata for storage in kept}
        gc.collect()
        self.on = True
        with self._watch():
            step()
        self.on = False

    def _add(self, result):
        """Count the storages that are new."""
        formula = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            with self.lock:
                if key in self.live or key in self.known:
                    continue
                gradient = formula or tuple(tensor.shape) in self.shapes
                sizes = (0 if gradient else storage.nbytes(), storage.nbytes())
                self.live[key] = weakref.ref(storage, lambda _, k=key, s=sizes: self._drop(k, s))
                self._change(sizes, 1)

    def _drop(self, key, sizes):
        """A storage has gone."""
        with self.lock:
            self.live.pop(key, None)
            self._change(sizes, -1)

    def _change(self, sizes, sign):
        """Add to what is live, and note the peaks."""
        self.now = [now + sign * size for now, size in zip(self.now, sizes, strict=True)]
        self.activations, self.all = max(self.activations, self.now[0]), max(self.all, self.now[1])
