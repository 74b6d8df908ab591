"""The report: a table for the terminal, a page and a picture that hold every run and stand for themselves."""

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.loadtest.figures import figures
from gateway.loadtest.page import page
from gateway.loadtest.plots import (
    DARK,
    LIGHT,
    NARROW,
    WIDE,
    Box,
    Mark,
    end_seconds,
    fitted,
    linear_ticks,
    log_ticks,
    phase_marks,
    picture,
    plot_svg,
    plots,
    short,
)
from gateway.loadtest.records import End, Outcome
from gateway.loadtest.report import table, terminal
from gateway.loadtest.scenario import to_json
from gateway.loadtest.series import series
from tests.unit.loadtest import runs


def document(label: str = "through <kvgate>", gateway: bool = True) -> dict[str, Any]:
    """As `report.json` holds it."""
    observations = runs.observations()
    if not gateway:
        observations.left_over, observations.gateway = None, []
    found = {
        "label": label,
        "began": "2026-11-29T12:00:00+00:00",
        "scenario": to_json(runs.SCENARIO),
        "targets": ["http://127.0.0.1:1"],
        "figures": figures(runs.SCENARIO, runs.recording(), observations, 8.0),
        "series": series(runs.SCENARIO, runs.recording(), observations),
    }
    loaded: dict[str, Any] = json.loads(json.dumps(found))
    return loaded


def cells(*documents: dict[str, Any]) -> dict[str, list[str]]:
    return {f"{section}: {label}": found for section, rows in table(documents) for label, found in rows}


def test_cells_hold_the_figures() -> None:
    found = cells(document())

    assert found["verdicts: preemptions"] == ["7"]
    assert found["verdicts: leaked at the end"] == ["nothing"]
    assert found["calls: answered in time (1 s, 200 ms)"] == ["2 (40.0%)"]
    assert found["refusals: count, p50 / p90 / p99 / max: in the gateway: queue_full"] == [
        "100: p50 <= 1.0 ms, p99 <= 5.0 ms"
    ]
    assert found["kvgate: real / predicted wait"] == ["4: 25.0% <= 0.8, 75.0% <= 1.25"]
    assert found["kvgate: reserved / limit while queued, demo/only"] == ["mean 85.0%, min 80.0% of 2 samples"]


def test_a_run_without_a_gateway_has_dashes_in_its_rows() -> None:
    found = cells(document("with"), document("without", gateway=False))

    assert found["verdicts: leaked at the end"] == ["nothing", "-"]
    assert found["kvgate: queue, most"] == ["3", "-"]


def test_verdicts_that_are_bad_say_so() -> None:
    bad = document()
    bad["figures"]["generator"]["kept_up"] = False
    bad["figures"]["kvgate"]["leaked"]["leases"] = 2

    assert cells(bad)["verdicts: load generator kept up"] == ["NO: not a measurement"]
    assert cells(bad)["verdicts: leaked at the end"] == ["2 leases"]
    assert "did not keep up" in page([bad])


@pytest.mark.parametrize(
    ("refusals", "failures", "why"),
    [(3, 2, "mostly 401 invalid_api_key"), (1, 2, "mostly failed: reset before headers")],
)
def test_a_run_in_which_nothing_was_admitted_says_why(refusals: int, failures: int, why: str) -> None:
    bad = document()
    bad["figures"]["attempts"] |= {"admitted": 0, "timed_out_by_stage": {}}
    bad["figures"]["attempts"]["failed_by_kind"] = {"reset_before_headers": failures}
    code = bad["figures"]["refused"].pop("429 queue_full") | {"count": refusals}
    bad["figures"]["refused"] = {"401 invalid_api_key": code}

    assert cells(bad)["verdicts: no call was answered"] == [why]
    assert f"no call was answered: {why}" in page([bad])
    assert "no call was answered" not in page([document()])


def test_attempts_add_up() -> None:
    recording = runs.recording()
    waits = runs.attempt(7.5, End.STOPPED, "", None, 8.0)
    waits.status = 0
    recording.calls.append(runs.call(5, "a", 7.5, Outcome.UNFINISHED, waits))
    streams = runs.attempt(7.6, End.STOPPED, "", 7.8, 8.0)
    recording.calls.append(runs.call(6, "a", 7.6, Outcome.UNFINISHED, streams))
    found = document()
    found["figures"] = figures(runs.SCENARIO, recording, runs.observations(), 8.0)

    rows = {label: int(cells_[0]) for label, cells_ in dict(table([found]))["attempts"][:8]}
    assert rows.pop("made") == sum(rows.values()) == 9
    assert (rows["still running at the end"], rows["still waiting at the end"]) == (1, 1)


def test_reports_of_older_versions_are_still_read() -> None:
    old = document()
    del old["figures"]["attempts"]["stopped_by_stage"]
    old["figures"]["attempts"]["stopped"] = 4

    assert cells(old)["attempts: still open at the end"] == ["4"]


def test_different_scenarios_are_told_in_the_head() -> None:
    other = document("second")
    other["scenario"]["name"] = "other"

    assert terminal([document("first"), other]).splitlines()[1].split() == [
        "DIFFERENT", "SCENARIOS", "paper", "other",
    ]  # fmt: skip
    assert "Different scenarios" in page([document("first"), other])
    assert "DIFFERENT" not in terminal([document("first"), document("second")])


def test_phases_are_marked_where_they_begin() -> None:
    marked = document()
    marked["scenario"]["phases"] = [
        {"seconds": 2.0, "sessions": 0.0, "calls_per_second": None},
        {"seconds": 3.0, "sessions": 300.0, "calls_per_second": None},
        {"seconds": 1.5, "sessions": None, "calls_per_second": 2.5},
    ]

    assert phase_marks([marked]) == (
        Mark(2, "300 sessions"),
        Mark(5, "2.5 calls/s"),
        Mark(6.5, "no new calls"),
    )
    assert phase_marks([marked, document()]) == ()
    assert picture([marked, marked]).count("300 sessions") == 1
    assert picture([marked]).count('class="m" d=') == 3 * 4


def test_names_of_marks_never_touch_each_other_nor_leave_the_frame() -> None:
    plot, box = plots([document()])[0], Box(400, 200)
    marks = [Mark(0, "hidden"), Mark(0.1, "first"), Mark(5, "second"), Mark(9.9, "third"), Mark(11, "later")]
    root = ElementTree.fromstring(plot_svg(plot, box, 10, "p", marks))

    found = [
        (text.text, float(text.get("x") or 0))
        for text in root.iter("text")
        if text.text in {m.name for m in marks}
    ]
    assert [name for name, _ in found] == ["first", "second", "third"]
    assert all(x + 6.2 * len(name or "") <= box.width - box.right for name, x in found)


def test_the_key_names_the_kinds_of_lines_that_are_there() -> None:
    keys = {plot.title.split(":")[0]: plot.key for plot in plots([document()])}

    assert keys["KV blocks"] == "solid used, dashed reserved, dotted limit"
    assert {plot.key for plot in plots([document(gateway=False)]) if "KV" in plot.title} == {"solid used"}
    assert "dashed reserved" in picture([document()])


def test_names_of_runs_are_whole_where_there_is_room() -> None:
    name = "kvgate with 4 engines on 2 cores"
    long = document(name)

    assert fitted(WIDE, [long]).right > WIDE.right
    assert f">{name}</text>" in picture([long])
    assert f"<title>{name * 3}</title>" in picture([document(name * 3)])


def test_columns_of_the_terminal_stand_under_each_other() -> None:
    lines = terminal([document("first"), document("second")]).splitlines()
    column = lines[0].index("second")

    rows = [line for line in lines if line.startswith("  offered")]
    assert rows
    assert all(line[column - 1] == " " and line[column] == "5" for line in rows)


@pytest.mark.parametrize("count", [1, 3])
def test_a_page_stands_for_itself(count: int) -> None:
    found = page([document(f"run <{number}>") for number in range(count)])

    assert "<script" not in found
    assert not re.findall(r"""(?:src|href)=|url\(|@import|<link|<img""", found)
    assert "run &lt;0&gt;" in found
    assert "run <" not in found
    assert found.count("<svg") == 2 * len(plots([document()]))
    idents = re.findall(r' id="([^"]+)"', found)
    assert len(set(idents)) == len(idents)


@pytest.mark.parametrize("box", [WIDE, NARROW])
def test_a_plot_says_in_words_what_it_shows(box: Any) -> None:
    documents = [document("one"), document("two", gateway=False)]
    for plot in plots(documents):
        root = ElementTree.fromstring(plot_svg(plot, box, end_seconds(documents), "p"))

        assert root.find("title") is not None
        assert "one" in (root.findtext("desc") or "")
        assert len(root.findall("path[@class]")) > len(plot.lines)
        places = [
            float(number) for text in root.iter("text") for number in (text.get("x"), text.get("y")) if number
        ]
        assert all(0 <= place <= box.width for place in places)


def test_the_picture_is_one_drawing_with_both_themes() -> None:
    root = ElementTree.fromstring(picture([document("ungated"), document("kvgate")]))

    titles = [
        text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "t"
    ]
    assert [title.split(",")[0] for title in titles] == [
        "Inter-token p99", "Preemptions", "KV blocks: used", "Completed output tokens",
    ]  # fmt: skip
    assert "prefers-color-scheme:dark" in picture([document()])


def test_lines_without_a_value_are_left_out() -> None:
    quiet = document()
    quiet["series"]["per_second"]["gap_p99_ms"] = [None] * 8

    assert not any("all gaps pooled" in plot.title for plot in plots([quiet]))


@settings(deadline=None)
@given(top=st.floats(1e-3, 1e9))
def test_linear_ticks_are_round_and_reach_the_top(top: float) -> None:
    ticks = linear_ticks(top)

    assert ticks[0] == 0
    assert ticks[-1] >= top * (1 - 1e-6)
    assert len(ticks) <= 6
    assert ticks[-2] < top


@settings(deadline=None)
@given(low=st.floats(1e-3, 1e6), factor=st.floats(1, 1e6))
def test_log_ticks_hold_all_values(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)

    assert ticks[0] <= low * (1 + 1e-9)
    assert ticks[-1] >= low * factor * (1 - 1e-9)
    assert len(ticks) >= 2


def test_short_numbers() -> None:
    assert [short(value) for value in (0, 7.25, 950, 12_345, 4_000_000)] == [
        "0",
        "7.25",
        "950",
        "12.3k",
        "4M",
    ]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_can_be_read_on_its_page(theme: str) -> None:
    """WCAG's contrast of 4.5 to 1."""
    colours = dict(re.findall(r"--(\w+):(#\w+)", theme))
    ground = luminance(colours.pop("page"))
    colours.pop("grid")

    for name, colour in colours.items():
        light, dark = sorted((luminance(colour), ground), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, name


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    channels = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
