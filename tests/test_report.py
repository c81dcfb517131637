"""The look of configurations, intervals, and files that are the same every time."""

import hashlib
import itertools
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.text import Text

from kl_comedy.report import colours, outputs
from kl_comedy.report.colours import LABELS, MARKERS, colour, line_style
from kl_comedy.report.curves import gradient_panel, mean_lines
from kl_comedy.report.figures import draw_legend, label_ends, panel_grid, spread, style
from kl_comedy.report.intervals import interval
from kl_comedy.report.outputs import save, write_table
from kl_comedy.theory.config import CHOICES, KLConfig


@pytest.fixture
def ax():
    style()
    fig, ax = plt.subplots(figsize=(5, 3))
    yield ax
    plt.close(fig)


def curves(labels, seeds=3):
    rng = np.random.default_rng(0)
    rows = itertools.product(labels, range(seeds), range(0, 50, 10))
    return pd.DataFrame(
        [
            {"label": label, "seed": seed, "step": step, "kl": rng.random()}
            for label, seed, step in rows
        ]
    )


@pytest.mark.parametrize("label", LABELS)
def test_a_configuration_and_its_label_look_the_same_for_every_beta(label):
    config = LABELS[label]
    assert config.label == label
    other = KLConfig(**config.to_dict() | {"beta": config.beta + 1})
    assert line_style(other) == line_style(label)
    assert colour(other) == line_style(label)["color"]


OWN_LOOK = [
    label
    for label, config in LABELS.items()
    if config.placement == "none" or config.estimator in MARKERS
]  # not of an estimator that was added and is drawn with a spare marker


def test_the_main_configurations_have_a_colour_each():
    main = [label for label in OWN_LOOK if "," not in label]
    assert len({colour(label) for label in main}) == len(main) == 1 + 3 * len(MARKERS) >= 13


@pytest.fixture
def new_estimators(monkeypatch):
    """Two estimators that `KLConfig` knows and no figure has heard of."""
    names = ("k4", "k5")
    more = CHOICES | {"estimator": (*CHOICES["estimator"], *names)}
    monkeypatch.setattr(sys.modules[KLConfig.__module__], "CHOICES", more)
    monkeypatch.setattr(colours, "CHOICES", more)
    monkeypatch.setattr(colours, "LABELS", colours._configs_by_label())
    return names


def test_a_new_estimator_has_a_look_of_its_own_and_changes_no_other(new_estimators, ax):
    before = {label: line_style(label) for label in LABELS}
    labels = [label for label in colours.LABELS if label not in LABELS]
    assert "K4 in reward" in labels and "K5 in both, to-go credit" in labels
    looks = [{**line_style(label), "color": 0, "markeredgecolor": 0} for label in colours.LABELS]
    for look in looks:
        look["markerfacecolor"] = look.get("markerfacecolor") == "white"
    assert len({str(look) for look in looks}) == len(colours.LABELS)  # in grey too
    assert {label: line_style(label) for label in LABELS} == before
    assert colour("K4 in loss") not in {colour(label) for label in OWN_LOOK}
    mean_lines(curves(["K4 in reward", "K1 in reward"]), "step", "kl", ax=ax)
    gradient_panel(gradients(label="K5 in loss"), ax)


@pytest.mark.parametrize(
    "label, base",
    [
        ("K3 in loss, clipped at 10", "K3 in loss"),
        ("forward K1 in reward, to-go credit", "K1 in reward, to-go credit"),
        ("forward K3 in both, token ratio, clipped at 2.5", "K3 in both, token ratio"),
    ],
)
def test_a_bound_or_a_direction_keeps_the_look_and_is_paler(label, base):
    assert colour(label) == colour(base)
    look, plain = line_style(label), line_style(base)
    assert look.pop("alpha") < 1 and look == plain and "alpha" not in plain


@pytest.mark.parametrize("label", ["K1", "k1-reward-b0.05", "forward", "forward no", "", None])
def test_an_unknown_label_is_refused_by_name(label):
    with pytest.raises(ValueError, match=f"label={label!r}"):
        colour(label)


@pytest.mark.parametrize(
    "wanted, gap",
    [([0.5] * 10, 0.08), ([0, 1, 0.99, 0.02], 0.1), ([3.0], 1), ([], 1), ([1, 0.5, 0], 0.5)],
)
def test_spread_keeps_the_order_the_gap_and_the_mean(wanted, gap):
    placed = spread(wanted, gap)
    order = np.argsort(wanted, kind="stable")
    assert (np.diff(placed[order]) >= gap - 1e-12).all()
    assert len(placed) == 0 or np.isclose(placed.mean(), np.mean(wanted))


def test_spread_stays_inside_when_there_is_room():
    np.testing.assert_allclose(spread([1, 1, 0.9], 0.1, 0, 1), [0.9, 1, 0.8])
    np.testing.assert_allclose(spread([0, 0], 0.1, 0, 1), [0, 0.1])
    np.testing.assert_allclose(spread([0, 0, 0], 0.6, 0, 1), [-0.2, 0.4, 1])


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_names_at_the_ends_do_not_overlap(ax, scale):
    for label in list(LABELS)[:14]:
        ax.plot([1, 2, 3], [1, 2, 2.01], label=label, **line_style(label))
    ax.plot([1, 2], [1, 1], label="_unnamed")
    ax.plot([1, 2], [np.nan, np.nan], label="K1 in both")
    ax.set_yscale(scale)
    label_ends(ax)
    ax.figure.canvas.draw()
    boxes = sorted((Text.get_window_extent(text) for text in ax.texts), key=lambda box: box.y0)
    assert len(boxes) == 14
    assert all(low.y1 <= high.y0 + 0.5 for low, high in itertools.pairwise(boxes))
    assert max(box.x1 for box in boxes) <= ax.figure.bbox.x1
    assert max(box.y1 for box in boxes) <= ax.figure.bbox.y1


@pytest.mark.parametrize("columns, legend", [(2, 1), (3, 1), (3, 2), (4, 2)])
@pytest.mark.parametrize("panels", [1, 5, 7, 8, 9])
def test_a_panel_more_leaves_the_legend_its_place(panels, columns, legend):
    style()
    fig, cells, free = panel_grid(panels, columns, legend)
    for ax in cells:
        ax.plot([0, 1], label="K3 in both, token credit")
        ax.set_title("a title")
    shown = draw_legend(free, [cells[0].lines[0]] * 4, "beta 0.1, 6 runs each")
    fig.draw_without_rendering()
    box = shown.get_window_extent()
    assert len(cells) == panels
    assert not any(ax.get_window_extent().overlaps(box) for ax in cells)
    places = [(round(ax.get_position().y0, 2), round(ax.get_position().x0, 2)) for ax in cells]
    assert places == sorted(places, key=lambda place: (-place[0], place[1]))  # reading order
    plt.close(fig)


@pytest.mark.parametrize(
    "values, match", [([], "one or more"), ([1, np.inf], "one or more"), ([[1, 2]], "one or more")]
)
def test_an_interval_of_bad_values_is_refused(values, match):
    with pytest.raises(ValueError, match=match):
        interval(values)


@pytest.mark.parametrize("level", [0, 1, 95, -0.5, np.nan])
def test_an_interval_of_a_bad_level_is_refused(level):
    with pytest.raises(ValueError, match="level="):
        interval([1, 2, 3], level=level)


def test_an_interval_holds_the_mean_and_widens_with_the_level():
    values = np.random.default_rng(0).exponential(size=40)
    narrow, wide = interval(values, level=0.5), interval(values, level=0.99)
    assert wide[0] < narrow[0] < values.mean() < narrow[1] < wide[1]


def test_mean_lines_draws_the_mean_of_each_label_and_a_band(ax):
    df = curves(["K1 in reward", "K3 in both, token credit, token ratio", "no KL"])
    assert mean_lines(df, "step", "kl", ax=ax) is ax
    means = df.groupby(["label", "step"])["kl"].mean()
    assert {line.get_label() for line in ax.lines} == set(df["label"])
    for line in ax.lines:
        np.testing.assert_allclose(line.get_ydata(), means[line.get_label()])
        assert line.get_color() == colour(line.get_label())
    assert len(ax.collections) == 3
    assert {text.get_text() for text in ax.texts} == set(df["label"])


@pytest.mark.parametrize(
    "spoil, match",
    [
        (lambda df: df.drop(columns="kl"), "kl"),
        (lambda df: df[:0], "no rows"),
        (lambda df: df.assign(label="K9"), "K9"),
    ],
)
def test_mean_lines_refuses_a_bad_table(ax, spoil, match):
    with pytest.raises(ValueError, match=match):
        mean_lines(spoil(curves(["no KL"])), "step", "kl", ax=ax)


def gradients(**columns):
    horizon = np.array([2, 4, 8])
    table = {
        "label": "K3 in loss",
        "horizon": horizon,
        "value": 0.1 * horizon,
        "low": 0.09 * horizon,
        "high": 0.11 * horizon,
    }
    return pd.DataFrame(table | columns)


def test_gradient_panel_draws_markers_for_what_was_measured_and_a_line_for_the_exact(ax):
    zero = gradients(label="K1 in reward", value=0.01, low=0.0, high=0.02, exact=1e-18)
    df = pd.concat([gradients(exact=gradients()["value"]), zero], ignore_index=True)
    assert gradient_panel(df, ax) is ax
    lines = {line.get_label(): line for line in ax.lines}
    assert set(lines) == {"K3 in loss", "_K3 in loss", "K1 in reward"}  # an exact 0 has no line
    assert lines["K3 in loss"].get_linestyle() == "None"
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert 0 < ax.get_ylim()[0] < 0.01
    bars = [path.vertices for bars in ax.collections for path in bars.get_paths()]
    assert len(bars) == 6 and all(bar[0, 1] > 0 for bar in bars)


@pytest.mark.parametrize(
    "df, match",
    [
        (gradients().drop(columns="low"), "low"),
        (gradients()[:0], "no rows"),
        (pd.concat([gradients(), gradients()]), "several rows"),
    ],
)
def test_gradient_panel_refuses_a_bad_table(ax, df, match):
    with pytest.raises(ValueError, match=match):
        gradient_panel(df, ax)


DRAW = """
import sys, pandas as pd
from matplotlib import pyplot as plt
from kl_comedy.report import colours, outputs
from kl_comedy.report.colours import LABELS, colour, line_style
from kl_comedy.report.curves import gradient_panel, mean_lines
from kl_comedy.report.figures import draw_legend, label_ends, panel_grid, spread, style
from kl_comedy.report.intervals import interval
from kl_comedy.report.outputs import save, write_table
style()
fig, ax = plt.subplots()
df = pd.DataFrame({"label": ["K1 in reward", "no KL"] * 6, "step": [0, 0, 1, 1] * 3,
                   "kl": range(12)})
mean_lines(df, "step", "kl", ax=ax)
save(fig, sys.argv[1], "figure")
"""


def test_two_processes_write_the_same_bytes(tmp_path):
    digests = []
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", DRAW, tmp_path / seed],
            check=True,
            env={"PYTHONHASHSEED": seed, "MPLBACKEND": "agg"},
        )
        files = [tmp_path / seed / f"figure.{kind}" for kind in ("png", "svg")]
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("layout", ["none", "constrained"])
def test_saving_a_figure_leaves_its_axes_where_they_are(tmp_path, layout):
    style()
    fig, ax = plt.subplots(layout=layout)
    ax.set(ylabel="a label")
    fig.draw_without_rendering()
    before = ax.get_position().bounds
    save(fig, tmp_path, "figure")
    fig.draw_without_rendering()
    np.testing.assert_allclose(ax.get_position().bounds, before, atol=0.01)
    plt.close(fig)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    table = pd.DataFrame({"a": [1.5]})
    write_table(table, tmp_path, "t")

    def full(self, data):
        raise OSError("no space left on device")

    monkeypatch.setattr(outputs.Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        write_table(table + 1, tmp_path, "t")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.csv", "t.md"]
    assert pd.read_csv(tmp_path / "t.csv").equals(table)


def test_a_table_survives_awkward_cells(tmp_path):
    table = pd.DataFrame({"label": ["a|b", "c"], "n": [3, 1000000], "x": [np.nan, 1234.5678]})
    csv, markdown = write_table(table, tmp_path, "t")
    back = pd.read_csv(csv)
    assert back["label"].to_list() == ["a|b", "c"] and back["n"].to_list() == [3, 1000000]
    assert markdown.read_text().splitlines() == [
        "| label | n | x |",
        "| --- | ---: | ---: |",
        "| a\\|b | 3 |  |",
        "| c | 1000000 | 1.23e+03 |",
    ]
