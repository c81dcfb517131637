"""The explorer in a browser: its numbers are the lab's, its controls work, its page is true."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from chromium import in_a_browser
from scipy.optimize import minimize

from kl_comedy.lab.gradients import divergence, exact_gradient, expected_gradient
from kl_comedy.lab.policies import Policy, occupancy, recent_policy
from kl_comedy.lab.variance import gradient_variance
from kl_comedy.report.colours import COLOURS, LABELS
from kl_comedy.theory.config import CHOICES, KLConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"
ESTIMATORS = ("k1", "k2", "k3", "exact")  # that the page has formulas for
CONFIGS = [
    config
    for config in LABELS.values()
    if config.placement != "none" and config.estimator in ESTIMATORS
]
START = {"a": -1, "b": 1, "A": 0.5, "B": 0.5, "C": 1, "T": 16, "reward": 0, "stale": 0}
pytestmark = in_a_browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The explorer's page, built by Sphinx as the site is, without the pages that it links to."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "src").mkdir()
    shutil.copy(DOCS / "explorer.md", folder / "src")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-n",
            "-W",
            "-q",
            "-c",
            DOCS,
            "-D",
            "root_doc=explorer",
            "-D",
            "include_patterns=explorer.md",
            "-D",
            "suppress_warnings=myst.xref_missing",
            folder / "src",
            folder / "html",
        ],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return folder / "html" / "explorer.html"


@pytest.fixture
def browser(chromium, page):
    """The page, opened anew on a desktop screen."""
    chromium.screen(1280, 900)
    chromium.open(page.as_uri())
    return chromium


def call(browser, name, *arguments):
    """One of the page's functions, once for each tuple of arguments."""
    return browser.run(f"{json.dumps(arguments)}.map(a => window.klExplorer.{name}(...a))")


def fields(config):
    return {name: getattr(config, name) for name in CHOICES}


# ---- the lab's side ----


@cache
def built(length):
    "Policy, reference and sampling policy of this length, whose parameters are set anew each time."
    ref, stale = (recent_policy([0, 0, 0, 0], length) for _ in range(2))
    return Policy([0, 0], ref.next_state, length, ref.features[..., :2]), ref, stale


def policies(x):
    "The policy of the settings `x`, its reference, and the sampling policy, None on-policy."
    policy, ref, stale = built(x["T"])
    policy.parameters = torch.tensor([x["a"], x["b"]], dtype=torch.float64)
    ref.parameters = torch.tensor([x["A"], x["B"], x["C"], 0], dtype=torch.float64)
    mine = torch.cat([policy.parameters, torch.zeros(2)])
    stale.parameters = mine + x["stale"] * (ref.parameters - mine)
    return policy, ref, stale if x["stale"] else None


def passed(policy):
    "The chance that the last token is +1, and its gradient."
    parameters = policy.parameters.clone().requires_grad_()
    probs = policy.logp(parameters).exp()
    chance = occupancy(policy, probs)[-1] @ probs[policy.layers[-1], 1]
    return chance.item(), torch.autograd.grad(chance, parameters)[0]


def field(x, config):
    policy, ref, stale = policies(x)
    g = expected_gradient(policy, ref, config, stale) if config else exact_gradient(policy, ref)
    return g - x["reward"] * passed(policy)[1] if x["reward"] else g


def curl(x, config, h=1e-3):
    def turn(d):
        (east, west), (north, south) = [
            [field({**x, name: x[name] + step}, config) for step in (d, -d)] for name in "ab"
        ]
        return (east - west)[1] - (north - south)[0]

    return ((8 * turn(h) - turn(2 * h)) / (12 * h)).item()


def descend(x, config):
    "The end of the descent, the number of policies on its path, and its fate."
    return followed(tuple(x.items()), config)


def moved(x, at):
    "The settings `x` with the policy somewhere else."
    return x | {"a": float(at[0]), "b": float(at[1])}


def kl_at(x, at):
    policy, ref, _ = policies(moved(x, at))
    return divergence(policy, ref).item()


@cache
def followed(settings, config):
    x = dict(settings)
    at = torch.tensor([x["a"], x["b"]], dtype=torch.float64)
    for n in range(4000):
        g = field(moved(x, at), config)
        step = g * min(1 / x["T"], 0.05 / g.norm().item() if g.norm() > 0 else math.inf)
        if step.norm() < 1e-7:
            return at.tolist(), n + 1, "ends" if n else "stays"
        at = at - step
        if at.abs().max() > 3:
            return at.tolist(), n + 2, "leaves"
    return at.tolist(), 4001, "moves"


def numbers(x, config):
    policy, ref, stale = policies(x)
    true, found = exact_gradient(policy, ref), expected_gradient(policy, ref, config, stale)
    bias = (found - true).norm().item()
    return {
        "kl": divergence(policy, ref).item(),
        "pass": passed(policy)[0],
        "gradient": true.tolist(),
        "expected": found.tolist(),
        "bias": bias,
        "variance": gradient_variance(policy, ref, config, stale),
        "relative": bias / true.norm().item(),
        "cosine": (
            torch.cosine_similarity(true, found, 0).item()
            if found.norm() > 1e-12 * x["T"]
            else None
        ),
    }


def random_settings(rng, length, stale):
    "Policy and reference at random; samples of the policy itself, or of one between the two."
    x = {name: round(rng.uniform(-2, 2), 3) for name in "abABC"}
    return x | {"T": length, "reward": 0, "stale": rng.uniform(0.1, 1) if stale else 0}


# ---- numbers ----


def test_every_configuration_has_the_numbers_of_the_lab(browser):
    rng = np.random.default_rng(0)
    lengths = itertools.cycle([1, 2, 3, 5, 8, 13, 17])
    cases = [
        (random_settings(rng, next(lengths), stale), c) for c in CONFIGS for stale in (False, True)
    ]
    cases += [
        (random_settings(rng, length, stale), c)
        for c in CONFIGS[::8]
        for length, stale in ((64, True), (128, False))
    ]
    found = call(browser, "compute", *[(x, fields(c)) for x, c in cases])
    for (x, config), page in zip(cases, found, strict=True):
        lab = numbers(x, config)
        size = max(np.linalg.norm(lab["gradient"]), np.linalg.norm(lab["expected"]))
        case = (x, config.label)
        for name in ("gradient", "expected", "bias"):
            assert page[name] == pytest.approx(lab[name], rel=1e-9, abs=1e-9 * size), (name, case)
        for name in ("kl", "pass", "variance"):
            assert page[name] == pytest.approx(lab[name], rel=1e-9), (name, case)
        assert (page["cosine"] is None) == (lab["cosine"] is None), case
        assert (page["cosine"] or 0) == pytest.approx(lab["cosine"] or 0, abs=1e-9), case
        assert page["relative"] == pytest.approx(lab["relative"], rel=1e-9, abs=1e-9), case
        assert page["relativeVariance"] == pytest.approx(
            lab["variance"] / np.linalg.norm(lab["gradient"]) ** 2, rel=1e-9
        ), case


def test_the_curl_is_that_of_the_labs_field(browser):
    rng = np.random.default_rng(1)
    cases = [(random_settings(rng, 4, True), config) for config in CONFIGS]
    found = call(browser, "compute", *[(x, fields(c)) for x, c in cases])
    for (x, config), page in zip(cases, found, strict=True):
        size = np.linalg.norm(page["gradient"]) + np.linalg.norm(page["expected"])
        assert page["curl"] == pytest.approx(curl(x, config), abs=1e-9 * max(1, size)), config.label


def test_the_unbiased_have_no_curl_and_the_frozen_states_do(browser):
    k3 = {
        place: call(browser, "compute", (START, fields(KLConfig("k3", place))))[0]["curl"]
        for place in ("loss", "both")
    }
    assert abs(k3["both"]) < 1e-9 and abs(k3["loss"]) > 1


def test_at_the_reference_relative_numbers_have_no_meaning(browser):
    x = START | {"a": 0.5, "b": 0.5, "C": 0}
    (page,) = call(browser, "compute", (x, fields(KLConfig("k3", "loss"))))
    assert page["bias"] == 0 and page["variance"] == 0 and page["kl"] == 0
    assert page["relative"] is page["relativeVariance"] is page["cosine"] is None


NEAR = START | {"C": 0, "T": 6}
DESCENTS = [
    (START, None),
    (START, KLConfig("k3", "loss")),
    (NEAR, KLConfig("k2", "both")),
    (NEAR, KLConfig("k1", "loss")),
    (NEAR, KLConfig("k3", "reward")),
    (NEAR | {"C": -1}, KLConfig("exact", "both", credit="to_go")),
    (NEAR | {"reward": 4}, None),
    (NEAR | {"reward": 4}, KLConfig("k3", "loss")),
    (NEAR | {"reward": 4}, KLConfig("k1", "loss")),
    (NEAR | {"stale": 0.5}, KLConfig("k1", "reward", importance="sequence")),
    (
        NEAR | {"C": -1, "stale": 0.5, "reward": 2},
        KLConfig("k3", "both", credit="token", importance="token"),
    ),
]


def test_descent_ends_where_it_ends_with_the_labs_gradients(browser):
    found = call(browser, "descend", *[(x, c and fields(c)) for x, c in DESCENTS])
    for (x, config), page in zip(DESCENTS, found, strict=True):
        end, length, fate = descend(x, config)
        assert [page["a"], page["b"]] == pytest.approx(end, rel=1e-9, abs=1e-9), (x, config)
        assert (len(page["path"]), page["fate"]) == (length, fate), (x, config)
        assert page["path"][0] == [x["a"], x["b"]] and page["path"][-1] == [page["a"], page["b"]]
    assert {page["fate"] for page in found} == {"ends", "stays", "leaves"}


# ---- configurations ----


def test_the_page_allows_what_klconfig_allows_and_has_its_labels(browser):
    assert set(ESTIMATORS) <= set(CHOICES["estimator"])
    offered = CHOICES | {"estimator": ESTIMATORS, "placement": CHOICES["placement"][1:]}
    assert browser.run("window.klExplorer.CHOICES") == {k: list(v) for k, v in offered.items()}
    for values in itertools.product(*[(*v, "other") for v in offered.values()]):
        choice = dict(zip(CHOICES, values, strict=True))
        try:
            label = KLConfig(**choice).label
        except ValueError:
            label = None
        (allowed,) = call(browser, "allowed", (choice,))
        assert allowed == (label is not None), choice
        if allowed:
            assert call(browser, "label", (choice,)) == [label]


def luminance(rgb):
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb]
    return np.dot([0.2126, 0.7152, 0.0722], linear)


def computed(browser, selector, name):
    "A computed colour, as three numbers from 0 to 1."
    text = browser.run(f"getComputedStyle(document.querySelector({selector!r})).{name}")
    values = [float(v) for v in re.findall(r"[\d.]+", text)][:3]
    return values if text.startswith("color(srgb") else [v / 255 for v in values]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_configuration_has_its_one_colour_and_is_readable(browser, theme):
    assert browser.run("window.klColours") == {"-".join(key): c for key, c in COLOURS.items()}
    browser.run(f"document.documentElement.dataset.theme = {theme!r}")
    paper = luminance(computed(browser, "body", "backgroundColor"))
    for (estimator, placement), colour in COLOURS.items():
        choose(browser, estimator=estimator, placement=placement)
        drawn = computed(browser, "#kl-explorer .mine.path", "stroke")
        pure = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        mixed = [(v + 1) / 2 for v in pure]  # half white
        assert drawn == pytest.approx(pure if theme == "light" else mixed, abs=1e-3)
        low, high = sorted([luminance(drawn), paper])
        assert (high + 0.05) / (low + 0.05) > (2.9 if theme == "light" else 4.5), colour


# ---- the page ----

SETTLED = "new Promise(done => setTimeout(done, 400))"  # the words follow the numbers


def choose(browser, **values):
    browser.run(f"""(() => {{
        const form = document.querySelector("#kl-explorer form");
        for (const [name, value] of Object.entries({json.dumps(values)}))
            form.elements[name].value = value;
        form.dispatchEvent(new Event("input", {{bubbles: true}}));
        return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    }})()""")


def shown(browser):
    "The cells of the table: what is written, and the number that was rounded for it."
    cells = browser.run("""[...document.querySelectorAll("#kl-explorer td[data-name]")].map(td =>
        [td.dataset.name, td.textContent, JSON.parse(td.dataset.value)])""")
    return {name: (text, value) for name, text, value in cells}


def holds(browser, x, config):
    "The table shows the lab's numbers for these settings."
    table, lab = shown(browser), numbers(x, config)
    wanted = {
        "true-gradient": lab["gradient"],
        "gradient": lab["expected"],
        "bias": lab["bias"],
        "cosine": lab["cosine"],
        "variance": lab["variance"],
        "curl": curl(x, config),
    }
    for prefix, c in (("true-", None), ("", config)):
        end, *_ = descend(x, c)
        wanted |= {
            f"{prefix}end": end,
            f"{prefix}kl": kl_at(x, end),
            f"{prefix}pass": passed(policies(moved(x, end))[0])[0],
        }
    for name, value in wanted.items():
        text, exactly = table[name]
        assert exactly == pytest.approx(value, rel=1e-9, abs=1e-9), name
        written = [float(v) for v in re.findall(r"-?[\d.]+(?:e-?\d+)?", text.replace("−", "-"))]
        rounded = np.atleast_1d(value) * (100 if name.endswith("pass") else 1)
        assert written[: len(rounded)] == pytest.approx(rounded, rel=5e-3, abs=1e-6), name


def focused(browser):
    return browser.run("document.activeElement.name || document.activeElement.tagName")


def tab_to(browser, name):
    for _ in range(60):
        if focused(browser) == name:
            return
        browser.press("Tab")
    raise AssertionError(f"{name} is not reached by the Tab key")


def test_every_control_is_reached_and_moved_by_the_keyboard(browser):
    tab_to(browser, "estimator")
    reached = []
    for _ in range(11):
        outline = browser.run("""(() => { const s = getComputedStyle(document.activeElement);
            return [s.outlineStyle, parseFloat(s.outlineWidth)] })()""")
        assert outline[0] == "solid" and outline[1] >= 2, focused(browser)
        assert browser.run("document.activeElement.labels.length") == 1, focused(browser)
        before = browser.run("document.activeElement.value")
        browser.press("ArrowRight" if len(reached) > 2 else "ArrowUp")
        reached.append(focused(browser))
        if reached[-1] != "importance":  # at its first choice, where up leads nowhere
            assert browser.run("document.activeElement.value") != before, reached[-1]
        browser.press("ArrowLeft" if len(reached) > 3 else "ArrowDown")
        assert browser.run("document.activeElement.value") == before or reached[-1] == "importance"
        browser.press("Tab")
    assert reached == ["estimator", "placement", "importance", *"abABCT", "reward", "stale"]


def test_keys_change_the_numbers_to_the_labs(browser):
    tab_to(browser, "placement")
    browser.press("ArrowDown")  # from the loss to both
    browser.press("Tab")
    assert focused(browser) == "credit"  # which acts now
    browser.press("ArrowDown")  # to-go
    tab_to(browser, "a")
    browser.press("ArrowRight", 3)
    tab_to(browser, "C")
    browser.press("ArrowLeft", 2)
    browser.press("Tab")
    browser.press("ArrowLeft")  # T, from 16 to 8
    tab_to(browser, "stale")
    browser.press("ArrowRight", 4)
    browser.run(SETTLED)
    x = START | {"a": -0.85, "C": 0.8, "T": 8, "stale": 0.2}
    holds(browser, x, KLConfig("k3", "both", credit="to_go"))
    said = browser.run("document.querySelector('[role=status]').textContent")
    assert said.startswith("K3 in both, to-go credit, 8 tokens: bias ")
    bias = float(re.search(r"bias ([\d.]+) % of g\*", said)[1])
    lab = numbers(x, KLConfig("k3", "both", credit="to_go"))
    assert bias == pytest.approx(100 * lab["relative"], rel=5e-3)


def test_a_click_on_the_map_moves_the_policy(browser):
    box = browser.run("""(() => { const r = document.querySelector("#kl-explorer .frame")
        .getBoundingClientRect(); return [r.left, r.top, r.width, r.height] })()""")
    spot = {"x": box[0] + box[2] * 4 / 6, "y": box[1] + box[3] * 2 / 6, "button": "left"}
    for kind in ("mousePressed", "mouseReleased"):
        browser.send("Input.dispatchMouseEvent", type=kind, clickCount=1, **spot)
    browser.run(SETTLED)
    lab, table = numbers(START | {"a": 1, "b": 1}, KLConfig("k3", "loss")), shown(browser)
    assert table["gradient"][1] == pytest.approx(lab["expected"], rel=1e-9)


def least(x):
    "The smallest KL on the map, by an optimiser, from several policies."

    def kl(at):
        policy, ref, _ = policies(moved(x, at))
        return divergence(policy, ref).item(), exact_gradient(policy, ref).numpy()

    starts = itertools.product((-1.5, 1.5), repeat=2)
    return min(minimize(kl, at, jac=True, bounds=[(-3, 3)] * 2).fun for at in starts)


def test_the_experiments_show_what_the_page_says(browser):
    text = " ".join(browser.run("document.querySelector('article').innerText").split())
    x, loss = START, KLConfig("k3", "loss")
    best, end = descend(x, None), descend(x, loss)
    assert kl_at(x, best[0]) == pytest.approx(least(x), abs=1e-9)
    assert f"g* ends at {kl_at(x, best[0]):.2f} nats, the least there is" in text
    assert f"K3 in the loss ends at {kl_at(x, end[0]):.2f} nats" in text
    (both,) = call(browser, "descend", (x, fields(KLConfig("k3", "both"))))
    assert [both["a"], both["b"]] == pytest.approx(best[0], rel=1e-9)

    x = START | {"C": 0}
    reward = numbers(x, KLConfig("k3", "reward"))
    assert f"its direction is {math.degrees(math.acos(reward['cosine'])):.0f}° from" in text
    assert descend(x, KLConfig("k3", "reward"))[2] == "leaves"
    assert descend(x, KLConfig("k1", "loss"))[2] == "stays"
    assert numbers(x, KLConfig("k1", "loss"))["variance"] > 1

    x = START | {"C": 0, "T": 64, "stale": 0.3}
    plain, token, whole = (numbers(x, KLConfig(importance=w)) for w in CHOICES["importance"])
    assert plain["cosine"] < -0.99 and descend(x, KLConfig())[2] == "leaves"
    assert numbers(x | {"stale": 0}, KLConfig())["relative"] < 1e-12
    assert f"a bias of {100 * token['relative']:.0f} % is left" in text
    assert whole["relative"] < 1e-12
    times = round(whole["variance"] / plain["variance"], -1)  # to the ten
    assert f"{times:.0f} times the variance" in text


def test_the_buttons_set_the_experiments_up(browser):
    for i, (x, config) in enumerate(
        [
            (START, KLConfig("k3", "loss")),
            (START | {"C": 0}, KLConfig("k3", "reward")),
            (START | {"C": 0, "T": 64, "stale": 0.3}, KLConfig("k1", "reward")),
        ]
    ):
        browser.run(f"document.querySelectorAll('button[data-settings]')[{i}].focus()")
        browser.press("Enter")
        browser.run(SETTLED)
        assert focused(browser) == "estimator"
        lab, table = numbers(x, config), shown(browser)
        assert table["bias"][1] == pytest.approx(lab["bias"], rel=1e-9)
        assert browser.run("document.querySelector('th.mine').textContent") == config.label


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_and_nothing_fails_or_is_fetched_from_outside(browser, page, width, theme):
    browser.screen(width, 844, theme)
    browser.open(page.as_uri())
    browser.run(SETTLED)
    assert browser.run("document.documentElement.dataset.theme") == theme
    assert browser.run("document.scrollingElement.scrollWidth") <= width
    assert browser.run("document.querySelector('#kl-explorer svg').clientWidth") > 250
    assert browser.faults() == []
    fetched = browser.fetched()
    assert len(fetched) > 5 and all(re.match("file:|data:", url) for url in fetched)


def test_it_is_small_and_on_its_page_only(page):
    files = [page.parent / "_static" / f"explorer.{kind}" for kind in ("js", "css")]
    assert sum(path.stat().st_size for path in files) < 30_000
    assert "explorer.js" in page.read_text() and "tex-svg" not in page.read_text()
    assert "explorer." not in (page.parent / "search.html").read_text().replace("explorer.html", "")
