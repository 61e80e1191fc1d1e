"""A listing in every form, from fields declared once, against values written by hand."""

from __future__ import annotations

from ringprof.report.listing import RANK, Field, FieldTable
from ringprof.report.sections.listings import LISTINGS
from ringprof.report.tables import Column, Listing
from ringprof.report.text import TextStyle
from ringprof.results.frames import FRAMES
from tests.loaded import analysis
from tests.paths import TRACES

RUN = TRACES / "cpu4-burst-4096"  # four ranks

TABLE = FieldTable(
    "things",
    lambda _: [
        {"name": "a", "time_ns": 4_000_000, "peers": (0, 1), "worst": 3},
        {"name": "b", "time_ns": None, "peers": (), "worst": 1},
    ],
    (
        Field("time_ns", "time", Column("time", "time"), summed=True),
        Field("name", "name", Column("thing"), shown=str.upper, json="label"),
        Field("peers", "peers", json=""),
        Field("worst", "", Column("worst\nrank", "count")),
    ),
    ("name", "worst", "time_ns"),
    title="things",
    nothing=lambda _: "things: none",
)


def test_tables_show_means_in_their_own_order_and_data_has_sums() -> None:
    findings = analysis(RUN).findings
    (text,) = TABLE.terminal(findings, TextStyle(), Listing(sort="worst rank", top=1))
    assert " ".join(text.split()) == "things, mean of 4 ranks, in ms worst rank time A 3 1.000 and 1 more: --all"
    page = TABLE.html(findings, None)  # type: ignore[arg-type]
    assert page is not None
    assert page.tables[0].titles == ["thing", "worst rank", "time ms"]
    assert [[cell.text for cell in row] for row in page.tables[0].rows] == [["A", "3", "1.000"], ["B", "1", "-"]]
    assert TABLE.items(findings) == [
        {"time_ns": 4_000_000, "label": "a", "worst": 3},
        {"time_ns": None, "label": "b", "worst": 1},
    ]
    assert TABLE.meanings == {"time_ns": "time", "name": "name", "peers": "peers"}
    empty = TABLE._replace(rows=lambda _: [])
    assert empty.terminal(findings, TextStyle(), Listing()) == ["things: none"]
    assert empty.html(findings, None) is None  # type: ignore[arg-type]


def test_every_listing_shows_each_column_once_and_has_a_frame() -> None:
    for table in (*LISTINGS, *FRAMES.values()):
        keys = [field.key for field in table.fields]
        assert len({*keys}) == len(keys) and len({*table.order}) == len(table.order), table.name
        shown = [field.key for field in table.fields if field.column is not None]
        assert {*table.order} <= {*shown}, table.name
        assert all(field.meaning or field.column for field in table.fields), table.name
        assert FRAMES[table.name] is table and hasattr(type(analysis(RUN)), table.name)
    assert RANK in FRAMES["steps"].fields
