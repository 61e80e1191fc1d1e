"""Tests of the contents of plots: lengths that sum to figures, labels that do not overlap, no global state."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import ringprof
from ringprof import cli
from ringprof.analysis.findings.findings import findings_in_memory
from ringprof.report import palette, plots
from ringprof.scale.pipeline import attribute
from tests.analysis.build import FLASH, Builder
from tests.analysis.rings import ring_pass
from tests.loaded import analysis
from tests.paths import ROOT
from tests.tiers import tiered

RUN = ROOT / "traces" / "h200x4-zigzag-65536"
KINDS = ("waterfall", "breakdown", "timeline", "steps", "waiting")


def plots_of(*builders: Builder) -> plots.Plots:
    attribution = attribute([builder.trace() for builder in builders])
    return plots.Plots(findings_in_memory(attribution))


def bars(ax: Axes) -> list[tuple[float, float]]:
    return [(patch.get_x(), patch.get_width()) for patch in ax.patches]  # type: ignore[attr-defined]


def test_a_plot_without_rows_is_empty_and_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bars(plots_of(Builder(world_size=1).run(FLASH, 0, 1000, launched=0)).steps()) == []


def test_waterfall_title_names_a_loss_and_not_needed_work():
    b = Builder(world_size=1).run("ampere_sgemm_128x64_nn", 0, 600_000, launched=1)
    b.run("ampere_sgemm_128x64_nn", 10**6, 2 * 10**6, launched=999_000)
    assert plots_of(b).waterfall().get_title(loc="left").endswith("most is lost to: host-bound idle")


def test_waterfall_bars_are_adjacent_and_sum_to_the_wall():
    run = analysis(RUN)
    drawn = bars(run.plot.waterfall())
    for (x, width), (following, _) in itertools.pairwise(drawn):
        assert following == pytest.approx(x + width)
    assert sum(width for _, width in drawn) == pytest.approx(run.summary.slowest_wall_ns / 1e6)


def test_breakdown_bar_of_a_rank_is_its_wall():
    run = analysis(RUN)
    ax = run.plot.breakdown()
    count = len(run.ranks)
    lengths = [sum(width for _, width in bars(ax)[rank::count]) for rank in range(count)]
    assert lengths == pytest.approx([wall / 1e6 for wall in run.breakdown()["wall_ns"]])
    assert ax.get_xlabel() == "ms"


def test_timeline_bars_are_the_activities():
    run = analysis(RUN)
    ax: Any = run.plot.timeline()
    spans = sum(path.vertices[:, 0].max() - path.vertices[:, 0].min()
                for collection in ax.collections for path in collection.get_paths())  # fmt: skip
    total = sum(kind.time_ns for rank in run.attribution.ranks for kind in rank.breakdown.kinds.values())
    assert spans == pytest.approx(total / 1e6, rel=1e-6)


def test_steps_and_waiting_plots_show_the_step_table():
    run = analysis(RUN)
    frame = run.steps()
    widths = [width for _, width in bars(run.plot.steps())]
    assert sum(widths) == pytest.approx((frame["block_ns"].sum() + frame["exposed_ns"].sum()) / 4e6)
    waiting: Any = run.plot.waiting()
    (image,) = waiting.images
    assert float(image.get_array().sum()) == pytest.approx(frame["exposed_ns"].sum() / 1e6)


@tiered("count", [1, 4, 8, 64, 256], [1, 4, 8, 64])
def test_labels_never_touch_at_any_number_of_ranks(count):
    builders = [Builder(rank=rank, world_size=count).run(FLASH, 0, 1000 + rank, launched=1) for rank in range(count)]
    ax = plots_of(*builders).breakdown()
    figure = ax.get_figure()
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in ax.get_yticklabels()]
    assert len(boxes) >= min(count, 4)
    assert not any(above.overlaps(below) for above, below in itertools.pairwise(boxes))


@pytest.mark.parametrize("kind", KINDS)
def test_plots_draw_into_the_given_axes_without_showing(kind):
    before = plt.get_fignums()
    _, ax = plt.subplots()
    assert getattr(analysis(RUN).plot, kind)(ax=ax) is ax
    assert ax.get_xlabel()
    plt.close(ax.get_figure())
    assert getattr(analysis(RUN).plot, kind)() is not ax
    assert plt.get_fignums() == before


def test_comparison_and_scaling_plots_of_several_runs():
    comparison = ringprof.compare(
        RUN, ROOT / "traces" / "h200x4-zigzag-65536-copied", ROOT / "traces" / "h200x4-zigzag-262144"
    )
    values = [entry.figures["tflops"].value for entry in comparison.entries]
    assert [width for _, width in bars(comparison.plot())] == pytest.approx(sorted(values, reverse=True))
    ax: Any = comparison.plot.scaling()
    lines = {str(line.get_label()): line for line in ax.get_lines()}
    assert list(lines) == ["the kernels' own rate", "zigzag", "zigzag (copied hops)"]
    assert list(lines["zigzag"].get_ydata()) == pytest.approx([values[0], values[2]])


def test_scaling_plot_has_a_line_per_number_of_hosts():
    """The run on two hosts is twenty times slower than that on one: no line may join it to another length's."""
    names = ("h200x4-zigzag-65536", "h200x4-zigzag-65536-two-hosts", "h200x4-zigzag-262144")
    ax: Any = ringprof.compare(*(ROOT / "traces" / name for name in names)).plot("scaling")
    lines = {str(line.get_label()): list(line.get_xdata()) for line in ax.get_lines()}
    assert lines["zigzag"] == [65536, 262144] and lines["zigzag (2 hosts)"] == [65536]


def test_plots_have_titles_of_run_and_content():
    """The figures are the report's: rank 1 exposes most, 7.0 %; most is lost to a kernel slower than flash-attn 3."""
    run = analysis(RUN)
    titles = {kind: getattr(run.plot, kind)().get_title(loc="left") for kind in KINDS}
    assert all(title.startswith("zigzag") and "65536 tokens" in title for title in titles.values())
    assert all("4 ranks, NVIDIA H200" in title.replace("\n", " ") for title in titles.values())
    assert titles["breakdown"].endswith("most on rank 1, 7.0 %")
    assert titles["waterfall"].endswith("lost to: kernel slower than the fastest known")
    frame = run.steps()
    worst = frame.loc[frame["exposed_ns"].idxmax()]
    assert titles["waiting"].endswith(
        f"rank {worst['rank']} in {worst['phase']} {worst['step']}, {worst['exposed_ns'] / 1e6:.2f} ms"
    )


def test_bar_labels_show_their_figures():
    run = analysis(RUN)
    labels = [text.get_text() for text in run.plot.waterfall().texts]
    assert labels[0] == f"{run.findings.waterfall.parts[0].time_ns / 1e6:.1f} ms, 48.5 %"
    assert len(labels) == sum(1 for part in run.findings.waterfall.parts if part.time_ns)
    assert [text.get_text() for text in run.plot.breakdown().texts] == [
        f"{100 * rank.breakdown.exposed_comm_share:.1f} % exposed" for rank in run.attribution.ranks
    ]


@pytest.mark.parametrize("name", ["h200x4-zigzag-262144", "h200x4-usp-65536-two-hosts", "h200x2-decode-1048576"])
@pytest.mark.parametrize("kind", ["waterfall", "breakdown", "steps"])
def test_labels_of_bars_stay_inside_the_axes(kind, name):
    run = analysis(ROOT / "traces" / name)
    if kind == "steps" and not run.findings.steps:
        pytest.skip("this run has no ring steps")
    ax = getattr(run.plot, kind)()
    ax.get_figure().draw_without_rendering()
    axes = ax.get_window_extent()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert boxes and all(box.x0 >= axes.x0 - 1 and box.x1 <= axes.x1 + 1 for box in boxes)


@pytest.mark.parametrize("name", ["h200x4-zigzag-262144", "h200x4-usp-262144"])
def test_titles_have_words_and_no_python(name):
    title = analysis(ROOT / "traces" / name).plot.waterfall().get_title(loc="left")
    assert "=" not in title and "False" not in title and "_" not in title
    assert not any(line.startswith("·") or line.endswith("·") for line in title.split("\n"))
    assert ("ulysses degree 2" in title) is ("usp" in name)


def lightness(colour: str) -> float:
    """Return L* of CIELAB of a colour, by its definition in CIE 15."""
    red, green, blue = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in (red, green, blue)]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return float(116 * y ** (1 / 3) - 16)


def test_waiting_and_wire_differ_in_lightness_too():
    """With any colour vision: two colours that are neighbours on a timeline are told apart by 20 of 100 steps."""
    assert abs(lightness(palette.WAIT) - lightness(palette.WIRE)) > 20


def test_names_lose_the_words_that_all_of_them_share():
    assert plots.without_common_prefix(["runs/a-zigzag-1", "runs/a-zigzag-1-copied"]) == (
        "runs/a-zigzag-", ["1", "1-copied"],
    )  # fmt: skip
    assert plots.without_common_prefix(["zigzag", "zig"]) == ("", ["zigzag", "zig"])
    assert plots.without_common_prefix(["a-b"]) == ("", ["a-b"])
    assert plots.without_common_prefix(["a-", "a-b"]) == ("", ["a-", "a-b"])


def test_scaling_of_one_length_draws_a_bar_per_strategy():
    names = ("h200x4-zigzag-262144", "h200x4-burst-262144", "h200x4-usp-262144")
    comparison = ringprof.compare(*(ROOT / "traces" / name for name in names))
    ax: Any = comparison.plot.scaling()
    values = [entry.figures["tflops"].value for entry in comparison.entries]
    assert [width for _, width in bars(ax)] == pytest.approx(sorted(values, reverse=True))
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert sorted(labels) == ["burst", "usp", "zigzag"]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plot_command_writes_a_picture(suffix, tmp_path, capsys):
    path = tmp_path / f"out.{suffix}"
    assert cli.run(["plot", "waterfall", str(RUN), "-o", str(path)]) == 0
    assert capsys.readouterr().err == f"Wrote {path}\n"
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["waterfall", str(RUN), "-o", "out.gif"], "one of .png, .svg, .pdf"),
        (["timeline", str(ROOT / "traces" / "cpu4-burst-4096"), "-o", "out.png"], "records no device activities"),
        (["comparison", str(RUN), "-o", "out.png"], "two measurements or more"),
    ],
)
def test_impossible_plot_is_a_one_line_error(arguments, message, capsys):
    assert cli.run(["plot", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_names_are_escaped_in_svg(tmp_path):
    builders = ring_pass()
    for builder in builders:
        builder.host = "<script>$x^2$</script>"
    ax = plots_of(*builders).breakdown()
    ax.set_title(plots._escape_dollars("<script>alert(1)</script> $\\frac{1}{2}$"))
    figure = ax.get_figure()
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "out.svg")
    assert "<script" not in (tmp_path / "out.svg").read_text()


def test_importing_the_library_loads_no_matplotlib():
    code = "import ringprof.results.analysis, ringprof.cli, sys; print({'matplotlib', 'bokeh'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
