"""Models, caches and trainers of transformers as they come. Most tests have stand-ins for its classes; the last part
needs the library itself."""

import copy
import dataclasses
import inspect
import sys
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import ArgumentError, AssumptionError, NoAttributeError, TraceError

# -- caches ------------------------------------------------------------------------------------------------------


class CacheLayerMixin:
    def __init__(self):
        self.keys = self.values = None
        self.is_initialized = False

    def update(self, keys, values):
        if not self.is_initialized:
            self.dtype, self.device = keys.dtype, keys.device
            self.keys = torch.tensor([], dtype=self.dtype, device=self.device)
            self.values = torch.tensor([], dtype=self.dtype, device=self.device)
            self.is_initialized = True
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=-2)
        return self.keys, self.values

    def length(self):
        return self.keys.shape[-2] if self.is_initialized else 0


class CountingLayer(CacheLayerMixin):
    """As the layers with a sliding window: they count for themselves."""

    def __init__(self):
        super().__init__()
        self.cumulative_length = 0

    def update(self, keys, values):
        self.cumulative_length += keys.shape[-2]
        return super().update(keys, values)

    def length(self):
        return self.cumulative_length


class DynamicCache:
    """As transformers' since 4.55: a list of layers."""

    def __init__(self, kind=CacheLayerMixin, layers=2):
        self.layers = [kind() for _ in range(layers)]
        self.layer_class_to_replicate = kind
        self.offloading = False

    def update(self, keys, values, layer):
        return self.layers[layer].update(keys, values)

    def get_seq_length(self):
        return self.layers[0].length()


class OldDynamicCache:
    """As transformers' before: two lists of tensors."""

    def __init__(self, **_):
        self._seen_tokens = 0
        self.key_cache, self.value_cache = [], []

    def update(self, keys, values, layer):
        if layer == 0:
            self._seen_tokens += keys.shape[-2]
        if len(self.key_cache) <= layer:
            self.key_cache.append(keys)
            self.value_cache.append(values)
        else:
            self.key_cache[layer] = torch.cat([self.key_cache[layer], keys], dim=-2)
            self.value_cache[layer] = torch.cat([self.value_cache[layer], values], dim=-2)
        return self.key_cache[layer], self.value_cache[layer]

    def get_seq_length(self):
        return self._seen_tokens


class EncoderDecoderCache:
    def __init__(self, **how):
        self.self_attention_cache, self.cross_attention_cache = DynamicCache(**how), DynamicCache(**how)
        self.is_updated = {0: False, 1: False}

    def update(self, keys, values, layer):
        self.is_updated[layer] = True
        self.cross_attention_cache.update(keys * 2, values, layer)
        return self.self_attention_cache.update(keys, values, layer)

    def get_seq_length(self):
        return self.self_attention_cache.get_seq_length()


class QuantizedCache(DynamicCache):
    pass


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, h, cache, layer):
        rows, length, _ = h.shape
        q, k, v = (t.view(rows, length, 2, 4).transpose(1, 2) for t in self.qkv(h).split(8, dim=-1))
        past = cache.get_seq_length() if layer == 0 else cache.get_seq_length() - length
        k, v = cache.update(k, v, layer)
        mask = torch.arange(past + length)[None] <= torch.arange(length)[:, None] + past
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return h + self.out(attended.transpose(1, 2).reshape(rows, length, 8))


class Decoder(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.wte, self.head = make, nn.Embedding(16, 8), nn.Linear(8, 16)
        self.h = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, ids, past_key_values=None):
        cache = past_key_values if past_key_values is not None else self.make()
        h = self.wte(ids)
        for i, block in enumerate(self.h):
            h = block(h, cache, i)
        return {"logits": self.head(h), "past_key_values": cache}


def made(name):
    return {
        "layers": DynamicCache,
        "counting layers": lambda: DynamicCache(CountingLayer),
        "lists": OldDynamicCache,
        "encoder and decoder": EncoderDecoderCache,
    }[name]


CACHES = ["layers", "counting layers", "lists", "encoder and decoder"]


def greedy(prefill, decode, ids, count):
    """Tokens by a call with the prompt, and calls with one token each."""
    out = prefill(ids)
    found = [out["logits"][:, -1:].argmax(-1)]
    for _ in range(count - 1):
        out = decode(found[-1], past_key_values=out["past_key_values"])
        found.append(out["logits"][:, -1:].argmax(-1))
    return torch.cat(found, 1), out


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", CACHES)
def test_prefill_and_decode_give_the_models_tokens(name, micro_batches):
    torch.manual_seed(0)
    model = Decoder(made(name)).eval()
    ids = torch.randint(16, (4, 5))
    plan = Plan(stages=2, micro_batches=micro_batches)
    expected, last = greedy(model, model, ids, 10)
    with torch.no_grad():
        prefill = fxsplit.compile(model, plan, example_args=(ids,))
        out = prefill(ids)
        example = {"past_key_values": out["past_key_values"]}
        token = out["logits"][:, -1:].argmax(-1)
        decode = fxsplit.compile(model, plan, example_args=(token,), example_kwargs=example)
        found, end = greedy(prefill, decode, ids, 10)
    assert torch.equal(found, expected)
    assert type(end["past_key_values"]) is type(last["past_key_values"])
    assert end["past_key_values"].get_seq_length() == last["past_key_values"].get_seq_length() == 14


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_is_given_out_has_the_rows_of_the_batch(name):
    torch.manual_seed(0)
    model, ids = Decoder(made(name)), torch.randint(16, (5, 6))
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=(ids,))
    out, expected = pipe(ids), model(ids)
    flat = fxsplit.compat.tree_leaves
    assert all(map(torch.is_tensor, flat(out["logits"])))
    for a, b in zip(flat(out["past_key_values"]), flat(expected["past_key_values"]), strict=True):
        torch.testing.assert_close(a, b)
    out["logits"].square().mean().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected["logits"].square().mean().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


def test_an_empty_cache_is_an_argument_like_another():
    model, ids = Decoder(DynamicCache).eval(), torch.randint(16, (4, 5))
    pipe = fxsplit.compile(model, example_args=(ids,), example_kwargs={"past_key_values": DynamicCache()})
    torch.testing.assert_close(pipe(ids, past_key_values=DynamicCache())["logits"], model(ids)["logits"])
    filled = model(ids)["past_key_values"]
    with pytest.raises(ArgumentError, match=r"past_key_values\.layers\[0\]\.keys"):
        pipe(ids, past_key_values=filled)


def test_a_pipeline_with_a_cache_is_saved_and_loaded(tmp_path):
    model, ids = Decoder(DynamicCache).eval(), torch.randint(16, (4, 5))
    fxsplit.compile(model, Plan(stages=2), example_args=(ids,)).save_code(tmp_path / "split")
    loaded = fxsplit.load(tmp_path / "split", model, trust=["tests.test_huggingface"])(ids)
    expected = model(ids)
    assert type(loaded["past_key_values"]) is DynamicCache
    assert torch.equal(loaded["past_key_values"].layers[1].keys, expected["past_key_values"].layers[1].keys)
    assert loaded["past_key_values"].layers[0].dtype is torch.float32


@pytest.mark.parametrize("how", ["quantized", "offloaded"])
def test_a_cache_that_cannot_be_cut_is_refused_with_a_remedy(how):
    model, ids = Decoder(DynamicCache), torch.randint(16, (4, 5))
    cache = QuantizedCache() if how == "quantized" else DynamicCache()
    cache.offloading = True
    with pytest.raises(ArgumentError, match=how.removesuffix("d")[:7]):
        fxsplit.compile(model, example_args=(ids,), example_kwargs={"past_key_values": cache})


# -- a single row ------------------------------------------------------------------------------------------------


class ExpandsForSeveralRows(nn.Module):
    """As transformers' masks: positions are expanded where there is more than one row."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        positions = torch.arange(x.shape[1])[None]
        if x.shape[0] != positions.shape[0]:
            positions = positions.expand(x.shape[0], -1)
        return self.b(self.a(x) + positions[..., None])


class MeansForSeveralRows(ExpandsForSeveralRows):
    def forward(self, x):
        h = self.a(x)
        if x.shape[0] != 1:
            h = h * 2
        return self.b(h)


def test_a_decision_that_only_a_single_row_takes_otherwise_is_no_guard():
    model = ExpandsForSeveralRows()
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=(torch.randn(4, 3, 4),))
    for rows in (4, 5, 1):
        x = torch.randn(rows, 3, 4)
        torch.testing.assert_close(pipe(x), model(x))


def test_a_decision_that_changes_the_numbers_of_a_single_row_stays_a_guard():
    pipe = fxsplit.compile(MeansForSeveralRows(), Plan(stages=2), example_args=(torch.randn(4, 3, 4),))
    with pytest.raises(fxsplit.errors.GuardError):
        pipe(torch.randn(1, 3, 4))


class CallsAVariableOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        output = self.a(x) * 2
        return output, x.sum(-1)


def test_a_variable_named_output():
    model, x = CallsAVariableOutput(), torch.randn(6, 4)
    pipe = fxsplit.compile(model, Plan(micro_batches=3), example_args=(x,))
    torch.testing.assert_close(pipe(x), model(x))


class InvertsAPermutation(nn.Module):
    """As the grouped experts of transformers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        flat = self.a(x).flatten(0, 1)
        order = torch.argsort(flat.detach()[:, 0])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0))
        return flat[order].tanh()[inverse].view(x.shape)


def test_a_permutation_that_is_inverted_gives_rows():
    model, x = InvertsAPermutation(), torch.randn(6, 3, 4)
    pipe = fxsplit.compile(model, Plan(micro_batches=3), example_args=(x,))
    torch.testing.assert_close(pipe(x), model(x))


# -- records -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class State:
    h: torch.Tensor
    extra: torch.Tensor | None = None
    scale: float = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: torch.Tensor


class Dotted(dict):
    def __getattr__(self, key):
        return self[key]


class Mirrored(OrderedDict):
    """As ModelOutput: its items are attributes too."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__.update(items)


class Odd(dict):
    def __init__(self, *, h):
        super().__init__(h=h + 1)
        self.h = h


class Whole(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.linear = make, nn.Linear(4, 4)
        self.register_forward_hook(lambda module, args, output: None)

    def forward(self, record):
        return self.make(h=self.linear(record.h))


class GivesRecords(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make
        self.a, self.b, self.c, self.d = nn.Linear(4, 4), Whole(make), Whole(make), nn.Linear(4, 4)

    def forward(self, x):
        record = self.c(self.b(self.make(h=self.a(x))))
        return self.d(record.h), record


@pytest.mark.parametrize("make", [State, Frozen, Dotted, Mirrored])
def test_modules_kept_whole_take_and_give_records(make):
    model, x = GivesRecords(make), torch.randn(6, 4)
    pipe = fxsplit.compile(model, Plan(stages=4, micro_batches=2), example_args=(x,))
    (out, record), (expected, other) = pipe(x), model(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(record.h, other.h)
    assert type(record) is make and set(pipe.traced.kept_whole) == {"b", "c"}


def test_a_record_that_its_class_does_not_make_again_is_refused():
    with pytest.raises(TraceError, match=r"takes a Odd, which Odd\(...\) does not make again"):
        fxsplit.compile(GivesRecords(Odd), example_args=(torch.randn(6, 4),))


class Fills(nn.Module):
    def forward(self, state):
        state["h"] = state["h"] * 2


class FillsItsArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Fills(), nn.Linear(4, 4)

    def forward(self, x):
        state = Dotted(h=x)
        self.a(state)
        return self.b(state["h"])


def test_a_module_kept_whole_that_changes_its_argument_is_no_node():
    model, x = FillsItsArgument(), torch.randn(6, 4)
    pipe = fxsplit.compile(model, example_args=(x,), leaf_modules=["a"])
    assert "a, which stays whole, changes its argument" in pipe.traced.report()
    torch.testing.assert_close(pipe(x), model(x))


class FindsOut(nn.Module):
    """As the classifiers of transformers: the first call writes which problem it is."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.problem = None
        self.calls = 0

    def forward(self, x):
        if self.problem is None:
            self.problem = "regression"
        return self.b(self.a(x))


class Counts(FindsOut):
    def forward(self, x):
        self.calls += 1
        return self.b(self.a(x)) * self.calls


def test_an_attribute_that_the_first_call_settles():
    model, x = FindsOut(), torch.randn(4, 4)
    pipe = fxsplit.compile(model, Plan(stages=2), example_args=(x,))
    assert model.problem is None
    torch.testing.assert_close(pipe(x), model(x))


def test_an_attribute_that_every_call_writes_is_refused():
    model = Counts()
    with pytest.raises(TraceError, match=r"writes self\.calls"):
        fxsplit.compile(model, example_args=(torch.randn(4, 4),))
    assert model.calls == 0


# -- the model's face --------------------------------------------------------------------------------------------


class Config:
    use_cache = False


class Pretrained(nn.Module):
    main_input_name = "x"

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def can_generate(self):
        return True

    def generate(self, x):
        return self(x)

    def rearrange(self):
        self.a, self.b = self.b, self.a

    def forward(self, x, labels=None, *, scale=1.0, **kwargs):
        y = self.b(self.a(x)) * scale
        return y if labels is None else ((y - labels).square().mean(), y)


@pytest.fixture
def face():
    return fxsplit.compile(Pretrained(), Plan(stages=2), example_args=(torch.randn(4, 4),))


def test_the_signature_of_forward_is_the_models(face):
    assert list(inspect.signature(face.forward).parameters) == ["x", "labels", "scale"]  # no other keywords
    assert inspect.signature(type(face).forward).parameters["self"]
    x = torch.randn(4, 4)
    torch.testing.assert_close(face.forward(x), face.model(x))


def test_attributes_are_the_models(face):
    assert face.config is face.model.config and face.dtype is torch.float32
    assert face.main_input_name == "x" and face.can_generate()
    assert face.a is face.model.a


def test_what_would_go_around_the_pipeline_is_not_handed_on(face):
    assert not hasattr(face, "rearrange")
    with pytest.raises(NoAttributeError, match=r"in_place\(\).*pipe\.unsplit\(\)\.rearrange"):
        _ = face.rearrange
    with pytest.raises(AttributeError, match="neither the pipeline nor its model \\(Pretrained\\)"):
        _ = face.confg
    copied = copy.deepcopy(face)
    assert copied.config is copied.model.config is not face.config


# -- transformers itself -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf():
    transformers = pytest.importorskip("transformers")
    try:
        transformers.GPT2LMHeadModel  # noqa: B018  imports it; some builds of torchvision cannot be imported
    except Exception as error:
        pytest.skip(f"transformers cannot be imported here: {error}")
    transformers.logging.set_verbosity_error()
    return transformers


DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
SEQ2SEQ = {"vocab_size": 96, "d_model": 32}
NAMES = {
    "GPT2LMHeadModel": {**GPT2, "eos_token_id": None, "pad_token_id": 0},
    "LlamaForCausalLM": DECODER,
    "Qwen3ForCausalLM": {**DECODER, "head_dim": 8},
    "Gemma2ForCausalLM": {**DECODER, "head_dim": 8},
    "MixtralForCausalLM": {**DECODER, "num_local_experts": 4},
    "BertForMaskedLM": {k: v for k, v in DECODER.items() if k != "num_key_value_heads"},
    "T5ForConditionalGeneration": {
        **SEQ2SEQ,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "BartForConditionalGeneration": {
        **SEQ2SEQ,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
    },
}


def pretrained(hf, name):
    torch.manual_seed(0)
    kind = getattr(hf, name)
    model = kind(kind.config_class(**NAMES[name]))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in vars(module).items():
            if "dropout" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    return model


def padded(rows, length=12):
    ids = torch.randint(3, 96, (rows, length))
    mask, labels = torch.ones_like(ids), ids.clone()
    for row in range(rows):
        end = length - 2 * row % 8
        ids[row, end:], mask[row, end:], labels[row, end:] = 0, 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("mask", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("name", NAMES)
def test_defaults_and_padded_labels_train_as_the_whole_batch(hf, name, mask):
    model, batch = pretrained(hf, name), padded(8)
    if not mask:
        del batch["attention_mask"]
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_kwargs=batch)
    for rows in (8, 5):
        part = {k: v[:rows] for k, v in batch.items()}
        expected = model(**part)
        expected.loss.backward()
        wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        found = pipe(**part)
        found.loss.backward()
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.logits, expected.logits)
        for key, gradient in wanted.items():
            torch.testing.assert_close(model.get_parameter(key).grad, gradient, rtol=1e-4, atol=1e-6)
        model.zero_grad()


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_prefill_and_decode_give_the_tokens_of_generate(hf, name):
    model, ids = pretrained(hf, name).eval(), torch.randint(3, 96, (4, 7))
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    plan = Plan(stages=2, micro_batches=2)
    with torch.no_grad():
        prefill = fxsplit.compile(model, plan, example_kwargs={"input_ids": ids})
        out = prefill(input_ids=ids)
        token = out.logits[:, -1:].argmax(-1)
        found, given = [ids, token], {"input_ids": token, "past_key_values": out.past_key_values}
        decode = fxsplit.compile(model, plan, example_kwargs=given)
        for _ in range(9):
            out = decode(input_ids=found[-1], past_key_values=out.past_key_values)
            found.append(out.logits[:, -1:].argmax(-1))
    assert torch.equal(torch.cat(found, 1), wanted)


HOW = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "no cache": {"do_sample": False, "use_cache": False},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_generate_runs_the_stages_and_gives_the_model_s_tokens(hf, name, how):
    model, ids = pretrained(hf, name).eval(), torch.randint(3, 96, (4, 7))
    given = {"max_new_tokens": 20, "attention_mask": torch.ones_like(ids), **HOW[how]}
    torch.manual_seed(3)
    wanted = model.generate(ids, **given)
    example = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :1]} if name.startswith("T5") else {})
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=2), example_kwargs=example)
    torch.manual_seed(3)
    assert torch.equal(pipe.generate(ids, **given), wanted)
    kinds = len(pipe._others)
    assert 1 <= kinds <= 3  # prefill, decode, beside the example's
    with pipe.in_place() as inside:
        torch.manual_seed(3)
        assert inside is model and torch.equal(model.generate(ids, **given), wanted)
    assert len(pipe._others) == kinds


def test_accelerate_prepares_a_pipeline(hf):
    accelerate = pytest.importorskip("accelerate")
    batch, parameters = padded(4), []
    for split in (True, False):
        model = pretrained(hf, "GPT2LMHeadModel")
        plan = Plan(stages=2, micro_batches=2)
        trained = fxsplit.compile(model, plan, example_kwargs=batch) if split else model
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        trained, optimizer = accelerator.prepare(trained, optimizer)
        for _ in range(3):
            accelerator.backward(trained(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        parameters.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration", "BertForMaskedLM"],
)
def test_a_model_without_values_gets_them(hf, name, tmp_path):
    model = pretrained(hf, name).eval()
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    batch = {"input_ids": torch.randint(3, 90, (4, 7)), "attention_mask": torch.ones(4, 7, dtype=torch.long)}
    if name.startswith("T5"):
        batch["labels"] = batch["input_ids"]
    pipe = fxsplit.compile(empty, Plan(stages=2, micro_batches=2), example_kwargs=batch, weights=tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(pipe(**batch).logits, model(**batch).logits)
    assert "numbers:" in pipe.verify()


def test_a_trainer_of_transformers_trains_a_pipeline(hf, tmp_path):
    pytest.importorskip("accelerate")
    batch = padded(12)
    rows = [{k: v[i] for k, v in batch.items()} | {"unknown": i} for i in range(12)]
    parameters = []
    for split in (True, False):
        model = pretrained(hf, "GPT2LMHeadModel")
        model.config.use_cache = False  # the Trainer sets it, and a pipeline is compiled for one of the two
        trained = (
            fxsplit.compile(model, Plan(stages=2, micro_batches=2), example_kwargs=padded(4))
            if split
            else model
        )
        arguments = hf.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        hf.Trainer(model=trained, args=arguments, train_dataset=rows).train()
        parameters.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*parameters, rtol=1e-4, atol=1e-5)


def test_a_classifier_finds_out_its_problem(hf):
    config = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
    model = hf.BertForSequenceClassification(hf.BertConfig(**config)).eval()
    batch = {**padded(8), "labels": torch.randint(2, (8,))}
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_kwargs=batch)
    torch.testing.assert_close(pipe(**batch).loss, model(**batch).loss)


def test_nothing_of_transformers_is_imported_by_fxsplit():
    assert "transformers" not in vars(fxsplit) and all(
        "transformers" not in getattr(module, "__dict__", {})
        for name, module in sys.modules.items()
        if name.startswith("fxsplit")
    )


def test_a_flag_that_a_trainer_sets_after_the_compile_says_what_to_type(hf):
    model, batch = pretrained(hf, "GPT2LMHeadModel"), padded(4)
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=2), example_kwargs=batch)
    model.config.use_cache = False
    with pytest.raises(
        AssumptionError, match=r"config.use_cache was True, is False(?s:.*)pipe.recompile\(\)"
    ):
        pipe(**batch)
    pipe.recompile()
    torch.testing.assert_close(pipe(**batch).loss, model(**batch).loss)


@pytest.mark.parametrize("name", ["XLNetModel", "XLNetLMHeadModel"])
def test_xlnet(hf, name):
    """Its modules have the batch in the second dimension, and give other outputs in train mode."""
    try:
        kind = getattr(hf, name)
    except Exception as error:
        pytest.skip(f"it cannot be imported here: {error}")
    model = kind(hf.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=32, dropout=0.0))
    x = torch.randint(0, 50, (4, 7))
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=2), example_args=(x,))
    assert len(pipe) == 2
    for training in (True, False):
        found, expected = pipe.train(training)(x), model(x)
        assert type(found) is type(expected) and list(found) == list(expected)
        torch.testing.assert_close(found[0], expected[0])
