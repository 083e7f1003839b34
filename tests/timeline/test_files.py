"""A timeline as files: the trace that Perfetto reads, the page, and what notebooks show."""

import itertools
import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan, errors
from fxsplit.__main__ import main
from fxsplit.timeline.trace import trace
from tests.helpers import LOSS, TiedBlocks, compiled, plan_for
from tests.timeline.browser import CHROMIUM, browser

X, TARGET = torch.randn(8, 4), torch.randint(0, 3, (8,))
HOSTILE = "<script>alert(1)<_script>\"'&"  # names of modules have no dots, and those of attributes no slashes


class Hostile(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(4, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(getattr(self, HOSTILE)(x))


def recorded(plan, model=None, steps=1):
    pipe = fxsplit.compile(model or TiedBlocks(), plan, example_args=(X,))
    with pipe.timeline() as timeline:
        for _ in range(steps):
            pipe.step(X, target=TARGET, **LOSS)
    return pipe, timeline


@pytest.fixture(scope="module")
def one_step():
    return recorded(plan_for("1f1b", micro_batches=4))


@pytest.mark.parametrize("schedule", ["gpipe", "zb_v"])
def test_a_trace_has_every_instruction_once(schedule, tmp_path):
    pipe, timeline = recorded(plan_for(schedule, micro_batches=4), steps=2)
    timeline.save(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [r for r in rows if r["ph"] == "X"]
    assert all(r["ts"] >= 0 and r["dur"] >= 0 and {"name", "pid", "tid", "cat"} <= r.keys() for r in complete)
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    assert set(names.values()) == set(pipe.tape.names)
    for pid in (1, 2):
        played = [r for r in complete if r["pid"] == pid and r["cat"] != "wait"]
        assert sorted(r["name"] for r in played) == sorted([str(x) for x in pipe.tape.order] * 2)
        for tid in {r["tid"] for r in played}:
            mine = sorted(
                (r for r in complete if (r["pid"], r["tid"]) == (pid, tid)),
                key=lambda r: (r["ts"], r["ts"] + r["dur"]),
            )
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(mine))
    arrows = [(r["id"], r["ph"]) for r in rows if r["ph"] in "sf"]
    assert arrows and len(arrows) == len(set(arrows))
    assert {i for i, ph in arrows if ph == "s"} == {i for i, ph in arrows if ph == "f"}


def test_other_names_of_files_say_what_to_type(one_step, tmp_path):
    _, timeline = one_step
    for name in ("trace.txt", "page", "page.htm", ".html"):
        with pytest.raises(errors.ArgumentError, match=r"page\.html(?s:.*)trace\.json"):
            timeline.save(tmp_path / name)
    for bad in (None, 3.5, b"x", object()):
        with pytest.raises(errors.ArgumentError, match="instead: "):
            timeline.save(bad)
    for step in (1, -2, "0"):
        with pytest.raises(errors.ArgumentError, match="1 were recorded"):
            timeline.save(tmp_path / "page.html", step=step)
    assert not list(tmp_path.iterdir())


def test_nothing_recorded(one_step, tmp_path):
    pipe, _ = one_step
    with pipe.timeline() as timeline:
        pass
    assert str(timeline) == "nothing was recorded"
    with pytest.raises(errors.ArgumentError, match=r"with pipe.timeline\(\)"):
        timeline.save(tmp_path / "page.html")


class Tags(HTMLParser):
    """What is open is closed; every tag with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def boxes(self):
        return [a for _, a in self.found if a.get("class", "").startswith("box ")]


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b"])
def test_a_page_has_a_box_for_each_event_and_asks_the_network_for_nothing(schedule, tmp_path):
    pipe, timeline = recorded(plan_for(schedule, micro_batches=4))
    timeline.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|//cdn|@import|url\((?!#)", text)
    assert "Content-Security-Policy" in text and "default-src 'none'" in text
    page = Tags(text)
    assert not page.open
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.found}
    assert not any({"src", "href", "onclick", "onload"} & a.keys() for _, a in page.found)
    measured, predicted = text.index('id="measured"'), text.index('id="predicted"')
    assert text[measured:predicted].count('class="box ') == len(timeline.events)
    for stage in pipe:
        assert stage.code.splitlines()[1] in unescape(text)


def test_a_module_has_its_lines(one_step, tmp_path):
    pipe, timeline = one_step
    timeline.save(tmp_path / "page.html")
    found = [a for _, a in Tags((tmp_path / "page.html").read_text(encoding="utf-8")).found]
    paths = {a["data-path"] for a in found if "data-path" in a}
    lines = {path for a in found if "data-modules" in a for path in json.loads(a["data-modules"])}
    computes = {path for path, module in pipe.model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert computes <= lines <= paths


@pytest.mark.parametrize("steps", [1, 3])
def test_which_step_a_page_shows(steps, tmp_path):
    _, timeline = recorded(plan_for("1f1b", micro_batches=2), steps=steps)
    timeline.save(tmp_path / "first.html", step=0)
    timeline.save(tmp_path / "last.html")
    first, last = ((tmp_path / f"{name}.html").read_text() for name in ("first", "last"))
    assert (first == last) == (steps == 1)


def test_what_users_name_is_text(tmp_path):
    pipe, timeline = recorded(Plan(stages=2, micro_batches=2), Hostile())
    timeline.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<script>") == 1 and "<script>alert" not in text
    assert HOSTILE in {a.get("data-path") for _, a in Tags(text).found}
    for shown in (pipe._repr_html_(), pipe[0]._repr_html_()):
        assert "<script" not in shown and "&lt;script" in shown


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_pages_of_other_pipelines(training, tmp_path):
    """Loaded without the model, without a step, simulated, without weights."""
    pipe = compiled(TiedBlocks(), (X,), stages=2, micro_batches=2)
    pipe.save_code(tmp_path / "saved")
    loaded = fxsplit.load(tmp_path / "saved", pipe.state_dict(), trust=["tests.helpers"])
    loaded.train(training)
    with loaded.timeline() as timeline:
        loaded(X).sum().backward()
    timeline.save(tmp_path / "loaded.html")
    pipe.simulated_timeline().save(tmp_path / "simulated.html")
    assert " units" in (tmp_path / "simulated.html").read_text()
    with torch.device("meta"):
        empty, x = TiedBlocks(), torch.randn(8, 4)
    without = fxsplit.compile(empty, Plan(stages=2, micro_batches=2, devices="cpu"), example_args=(x,))
    without.simulated_timeline().save(tmp_path / "without.html")
    for one in (pipe, loaded, without):
        assert "<table>" in one._repr_html_() and one._repr_html_().count("<details>") == 2
        assert getattr(one, "_repr_mimebundle_", None) is None
    for page in tmp_path.glob("*.html"):
        assert Tags(page.read_text()).boxes()


def test_a_demo_writes_a_page(tmp_path, capsys):
    options = ["--seconds", "0.1", "--layers", "1", "--stages", "2", "--batch", "4"]
    assert main(["demo", *options, "--timeline", str(tmp_path / "page.html")]) == 0
    assert "bubble" in capsys.readouterr().out and (tmp_path / "page.html").exists()
    assert main(["demo", *options, "--timeline", "page.txt"]) == 2
    assert "neither a page nor a trace" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_in_a_browser(tmp_path):
    pages = {}
    for name, plan, model in (
        ("v", plan_for("zb_v", micro_batches=6), None),
        ("replicas", Plan(stages=3, micro_batches=4, replicas=[2, 1, 1]), None),
        ("hostile", Plan(stages=2, micro_batches=2, schedule="1f1b"), Hostile()),
    ):
        _, timeline = recorded(plan, model, steps=2)
        pages[name] = tmp_path / f"{name}.html", timeline[-1]
        timeline.save(pages[name][0])
    with browser(tmp_path / "profile") as chromium:
        for name, (path, step) in pages.items():
            for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
                chromium.open(path, width, dark=dark)
                assert chromium.run("document.querySelectorAll('#measured .box').length") == len(step.events)
                assert chromium.run("document.documentElement.scrollWidth") <= width
                light = (
                    chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
                )
                assert light == (not dark)
                picture = tmp_path / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                chromium.screenshot(picture)
                assert picture.stat().st_size > 10_000
                _use(chromium, step)
                assert chromium.requests() == [path.as_uri()] and not chromium.complaints()


def _use(chromium, step):
    """The pointer and the keys show what a box is, a module shows its lines."""
    first = step.of(step.workers[0])
    x, y = chromium.run(
        "(() => { const b = document.querySelector('#measured .box').getBoundingClientRect();"
        " return [b.x + b.width / 2, b.y + b.height / 2] })()"
    )
    chromium.point(x, y)
    assert chromium.run("tip.hidden") is False
    assert chromium.run("tip.textContent").startswith(f"{first[0]}: forward of stage 0")
    chromium.run("document.querySelector('#measured .box').focus()")
    chromium.press("ArrowRight")
    assert chromium.run("document.activeElement.dataset.tip").startswith(f"{first[1]}: ")
    assert chromium.run("document.querySelectorAll('.lit').length") == 0
    chromium.run("document.querySelector('[data-path]').click()")
    assert chromium.run("document.querySelectorAll('.lit').length") > 1
    chromium.run("document.querySelector('[data-path]').click()")
    assert chromium.run("document.querySelectorAll('.lit').length") == 0
    leaf = "document.querySelectorAll('[data-path]')[1]"
    chromium.run(f"{leaf}.click()")
    lit = chromium.run("[...document.querySelectorAll('.lit')].map(l => JSON.parse(l.dataset.modules))")
    path = chromium.run(f"{leaf}.dataset.path")
    assert lit and all(any(m == path or m.startswith(path + ".") for m in modules) for modules in lit)


def test_arrows_lead_from_one_worker_to_another():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=2), example_args=(torch.randn(4, 4),))
    rows = json.loads(trace(pipe.simulated_timeline().steps))["traceEvents"]
    begins, ends = ({r["id"]: r for r in rows if r["ph"] == letter} for letter in "sf")
    assert begins.keys() == ends.keys() and len(begins) == 4
    for name, begin in begins.items():
        assert begin["tid"] != ends[name]["tid"] and begin["ts"] <= ends[name]["ts"]
