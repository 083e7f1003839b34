"""A pipeline in the place of its model: whoever calls the model calls stages, whatever the arguments."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan, errors
from fxsplit.runtime.in_place import InPlace


class Decoder(nn.Module):
    """Attention to all that came before, in a cache that it is given and gives back, and a loop around it."""

    def __init__(self):
        super().__init__()
        self.embed, self.key, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.calls = 0

    def forward(self, ids, past=None):
        x = self.embed(ids)
        keys = self.key(x) if past is None else torch.cat([past["keys"], self.key(x)], 1)
        weights = (x @ keys.transpose(1, 2)).softmax(-1)
        return {"scores": self.out(weights @ keys), "past": {"keys": keys}}

    def generate(self, ids, steps=6):
        out = self(ids)
        for _ in range(steps):
            token = out["scores"][:, -1:].argmax(-1)
            ids = torch.cat([ids, token.to(ids.device)], 1)
            out = self(token, past=out["past"])
        return ids


IDS = torch.randint(0, 9, (4, 5))


def made(**fields):
    torch.manual_seed(0)
    model = Decoder().eval()
    return model, fxsplit.compile(model, Plan(stages=2, **fields), example_args=(IDS,))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_generate(micro_batches):
    model, pipe = made(micro_batches=micro_batches)
    wanted, played = model.generate(IDS), []
    pipe.register_action_hook(lambda event: played.append(event))
    with torch.no_grad():
        assert torch.equal(pipe.generate(IDS), wanted)
        assert torch.equal(pipe.generate(IDS[:2], steps=3), model.generate(IDS[:2], steps=3))
    assert played and len(pipe._others) == 1
    assert "_compiled_call_impl" not in vars(model)


def test_within_the_model_is_the_pipeline_and_afterwards_itself():
    model, pipe = made()
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(module))
    with pytest.raises(KeyError), pipe.in_place() as inside:
        assert inside is model
        found = model(IDS)
        assert seen == [model]
        with pipe.in_place():
            model(IDS)
        found["scores"].sum().backward()
        raise KeyError
    assert model.out.weight.grad is not None
    assert "_compiled_call_impl" not in vars(model)
    torch.testing.assert_close(model(IDS)["scores"], found["scores"])


def test_what_was_compiled_before_is_there_again():
    model, pipe = made()
    model.compile(backend="eager")
    before = model._compiled_call_impl
    with pipe.in_place():
        assert model._compiled_call_impl is not before
    assert model._compiled_call_impl is before


def test_what_no_pipeline_can_be_made_for_says_why():
    model, pipe = made()
    with pipe.in_place():
        with pytest.raises(errors.FxsplitError, match="fails on the example"):
            model(IDS, past={"keys": torch.zeros(4, 2, 7)})
        model(IDS)
    loaded = copy.deepcopy(pipe)
    loaded.compiled_by(None)
    with pytest.raises(errors.ArgumentError, match="without its model"), loaded.in_place():
        pass


def test_a_copy_has_pipelines_of_its_own():
    model, pipe = made()
    pipe.generate(IDS)
    other = copy.deepcopy(pipe)
    with torch.no_grad():
        other.model.out.bias.add_(torch.arange(9.0))
    assert torch.equal(other.generate(IDS), other.model.generate(IDS))
    assert torch.equal(pipe.generate(IDS), model.generate(IDS))


def test_threads_and_contexts_in_any_order():
    model, pipe = made()
    wanted, found = model.generate(IDS, steps=3), []

    def work():
        found.extend(pipe.generate(IDS, steps=3) for _ in range(4))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and all(torch.equal(f, wanted) for f in found)
    assert len(pipe._others) == 1 and "_compiled_call_impl" not in vars(model)
    first, second = pipe.in_place(), pipe.in_place()
    first.__enter__()
    second.__enter__()
    latest = vars(model)["_compiled_call_impl"]
    first.__exit__(None, None, None)
    assert vars(model)["_compiled_call_impl"] is latest
    second.__exit__(None, None, None)
    assert "_compiled_call_impl" not in vars(model)


class ToyCache:
    """Is changed by the forward that it is given to, as those of transformers are."""

    def __init__(self, keys):
        self.keys = keys


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 9)

    def forward(self, x, past):
        past.keys = torch.cat([past.keys, self.key(x)], 1)
        return {"scores": self.out(past.keys.sum(1)), "past": past}


def test_a_cache_that_is_given_holds_what_forward_left_in_it():
    model, x = Caching().eval(), torch.randn(4, 2, 4)
    pipe = fxsplit.compile(model, Plan(stages=2), example_args=(x, ToyCache(torch.randn(4, 3, 4))))
    held = torch.randn(4, 3, 4)
    expected, cache = ToyCache(held), ToyCache(held)
    model(x, expected)
    with pipe.in_place():
        model(x, cache)
    torch.testing.assert_close(cache.keys, expected.keys)


class Kind:
    def __init__(self, word, asked):
        self.word, self.asked = word, asked

    def takes(self, args, kwargs):
        self.asked.append(self.word)
        return args == (self.word,)

    def __call__(self, *args):
        return self.word


def test_who_was_called_last_is_asked_first():
    asked = []
    stand_in = InPlace(
        Kind("a", asked), [], lambda args, kwargs: Kind(*args, asked), threading.RLock(), "gpipe"
    )
    for word, wanted in (
        ("a", "a"),
        ("b", "a"),
        ("b", "b"),
        ("c", "ba"),
        ("c", "c"),
        ("a", "ca"),
        ("a", "a"),
    ):
        asked.clear()
        assert stand_in(word) == word
        assert "".join(asked) == wanted


def test_hooks_run_once_and_their_errors_are_the_caller_s():
    model, pipe = made()
    runs = []
    model.register_forward_pre_hook(lambda module, args: runs.append(1))
    with pipe.in_place():
        for k in range(3):
            out = model(IDS)
            model(IDS[:, -1:], past=out["past"])
            assert len(runs) == 2 * (k + 1)
        kinds = len(pipe._others)

        def fails(module, args, output):
            raise errors.ArgumentError("of the user's")

        model.register_forward_hook(fails)
        for _ in range(2):
            with pytest.raises(errors.ArgumentError, match="of the user's"):
                model(IDS)
        assert len(pipe._others) == kinds


@pytest.mark.parametrize("kind", ["example", "other"])
def test_a_call_of_the_model_from_inside_of_a_call_is_refused(kind):
    model, pipe = made(micro_batches=2)
    with pipe.in_place():
        past = model(IDS)["past"]
        model(IDS[:, -1:], past=past)  # and so there is a pipeline for that
        pipe.register_action_hook(lambda event: model(IDS))
        with pytest.raises(errors.ArgumentError, match="from inside of its own call"):
            model(IDS) if kind == "example" else model(IDS[:, -1:], past=past)


def test_a_pipeline_that_has_generated_is_freed_at_once():
    _, pipe = made(micro_batches=2)
    pipe.generate(IDS)
    seen = weakref.ref(pipe)
    gc.disable()
    try:
        del pipe
        assert seen() is None
    finally:
        gc.enable()
