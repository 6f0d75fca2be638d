"""The page of a report in a real browser: it works from disk, offline, by mouse and keyboard, on any screen."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import Browser
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import remat
from remat import Graph, Op, Tensor
from remat.core.plan import plan_for_schedule
from remat.report import Report

MIB = 2**20
LAYERS = 40
OPS = 1_200
EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"

# The least contrast of any text with what lies behind it, as WCAG 2 counts it.
CONTRAST = """
const part = (value) => value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
const light = (rgb) => {
  const [r, g, b] = rgb.match(/\\d+/g).map(Number).map(part);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const page = light(getComputedStyle(document.body).backgroundColor);
return [...document.querySelectorAll('p, td, dt, dd, small, h1, h2, button, footer')].map((element) => {
  const style = getComputedStyle(element), panel = element.closest('.cards div');
  const own = style.backgroundColor !== 'rgba(0, 0, 0, 0)' ? style.backgroundColor : null;
  const back = own ? light(own) : panel ? light(getComputedStyle(panel).backgroundColor) : page;
  const [a, b] = [light(style.color), back].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}).reduce((a, b) => Math.min(a, b));
"""


def step(ops: int) -> Graph:
    """A forward and a backward pass through as many layers as there are, with names as long as real ones."""
    half = ops // 2
    tensors = [Tensor(MIB, "weights", role="parameter"), Tensor(2 * MIB, "images", role="batch")]
    made = []
    for index in range(half):
        layer = EVIL if index == 3 else f"encoder/block_{index * LAYERS // half}/attention/dense"
        tensors.append(Tensor(MIB + index, f"activation {index}", (512, 512), "float32"))
        reads = (0, len(tensors) - 2)
        made.append(
            Op(
                f"model/{layer}/operation_number_{index}",
                "MatMul" if index % 3 else "Relu",
                reads,
                (len(tensors) - 1,),
                1e-5 * (1 + index % 7),
                phase="forward",
                layer=layer,
                source=f"models/transformer.py:{index} in call",
                recomputable=index % 50 != 7,
            )
        )
    gradient, kept = len(tensors) - 1, []
    for index in reversed(range(half)):
        tensors += [Tensor(MIB, f"gradient {index}"), Tensor(MIB // 2, f"gradient of weights {index}")]
        outputs = (len(tensors) - 2, len(tensors) - 1)
        made.append(Op(f"backward/{index}", "MatMulGrad", (gradient, 2 + index), outputs, 2e-5, phase="backward"))
        gradient = outputs[0]
        kept.append(outputs[1])
    return Graph(tuple(made), tuple(tensors), (0, 1), tuple(kept), free_order=False)


def reported(ops: int) -> Report:
    """A plan made by hand: what every third op made is dropped and made again before its backward op."""
    graph, half = step(ops), ops // 2
    again = {
        index for index in range(3, half, 3) if graph.ops[index].recomputable and graph.ops[index - 1].recomputable
    }
    schedule = list(range(half))
    for backward in range(half, ops):
        forward = ops - 1 - backward
        schedule += [forward, backward] if forward in again and forward - 1 not in again else [backward]
    plan = plan_for_schedule(graph, tuple(schedule), planner="by hand")
    plain = remat.plan(graph, "100%")
    bounded = replace(plan, overhead_lower_bound=plan.overhead / 2)
    return Report(graph, plan, (bounded, plain), f"A step of {ops:,} operations")


@pytest.fixture(scope="module")
def report() -> Report:
    return reported(OPS)


@pytest.fixture(scope="module")
def page(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.save(path)
    return path


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.quit()


@pytest.fixture
def browser(started: Browser, page: Path) -> Browser:
    """The page, freshly opened, with nothing left in the logs."""
    started.open(page)
    return started


def view(browser: Browser) -> tuple[float, float]:
    found = browser.run("const c = document.querySelector('canvas').dataset; return [c.from, c.to]")
    return float(found[0]), float(found[1])


def readout(browser: Browser, section: str = "memory") -> str:
    return str(browser.driver.find_element(By.CSS_SELECTOR, f"#{section} .readout").text)


def press(browser: Browser, *keys: str) -> None:
    canvas = browser.driver.find_element(By.TAG_NAME, "canvas")
    for key in keys:
        canvas.send_keys(key)
    browser.settle()


def pixels(browser: Browser, selector: str) -> np.ndarray:
    element = browser.driver.find_element(By.CSS_SELECTOR, selector)
    browser.run("arguments[0].scrollIntoView({block: 'center'})", element)
    browser.settle()
    return np.asarray(Image.open(io.BytesIO(element.screenshot_as_png)).convert("RGB")).reshape(-1, 3).astype(int)


def has_colour(browser: Browser, selector: str, variable: str) -> bool:
    """Is a line of this colour of the palette on the screen?"""
    text = browser.run(
        "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()", variable
    )
    wanted = np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)])
    return bool((np.abs(pixels(browser, selector) - wanted).max(axis=1) < 12).sum() > 20)


def test_opens_from_disk_without_a_request_or_an_error_and_is_small(started: Browser, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    reported(10_000).save(page)
    started.open(page)

    assert [url for url in started.requests() if not url.startswith(("file:", "data:"))] == []
    assert started.console() == []
    assert page.stat().st_size < 3_000_000
    assert started.driver.title == "A step of 10,000 operations: memory plan"
    assert has_colour(started, "canvas", "--planned")


def test_the_logs_of_the_test_above_see_errors_and_requests(started: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<link rel=icon href='data:,'><img src='http://127.0.0.1:9/picture.png'><script>oops()</script>")
    started.requests()
    started.open(bad)

    assert any("127.0.0.1" in url for url in started.requests())
    assert any("oops" in message for message in started.console())


def test_a_name_is_text_and_never_markup(browser: Browser) -> None:
    press(browser, Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)

    assert "<img src=x" in readout(browser)
    assert "taken" not in browser.driver.title
    assert browser.run("return document.querySelectorAll('img').length") == 0


def test_buttons_zoom_in_and_out(browser: Browser) -> None:
    assert view(browser) == (0, 1)
    buttons = {b.text: b for b in browser.driver.find_elements(By.CSS_SELECTOR, "#memory button")}

    buttons["Zoom in"].click()
    browser.settle()
    assert view(browser) == (0.25, 0.75)
    buttons["Zoom out"].click()
    browser.settle()
    assert view(browser) == (0, 1)
    buttons["To the peak"].click()
    browser.settle()
    assert view(browser)[1] - view(browser)[0] == pytest.approx(0.08)
    buttons["Whole step"].click()
    browser.settle()
    assert view(browser) == (0, 1)


def test_dragging_zooms_into_what_was_selected(browser: Browser) -> None:
    canvas = browser.driver.find_element(By.TAG_NAME, "canvas")
    ActionChains(browser.driver).move_to_element_with_offset(canvas, -100, 0).click_and_hold().move_by_offset(
        200, 0
    ).release().perform()
    browser.settle()

    start, end = view(browser)
    width = canvas.size["width"] - 74  # Less the margins.
    assert end - start == pytest.approx(200 / width, rel=0.05)
    assert 0.3 < start < end < 0.7


def test_wheel_zooms_a_focused_chart_only(browser: Browser) -> None:
    canvas = browser.driver.find_element(By.TAG_NAME, "canvas")
    scroll = (
        "arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: -240, bubbles: true, cancelable: true,"
        " clientX: 600, clientY: 300}))"
    )
    browser.run(scroll, canvas)
    browser.settle()
    assert view(browser) == (0, 1)

    browser.run("arguments[0].focus()", canvas)
    browser.run(scroll, canvas)
    browser.settle()
    start, end = view(browser)
    assert end - start == pytest.approx(np.exp(-1), rel=1e-3)


def test_keys_walk_through_the_step_and_name_the_op_its_layer_and_its_bytes(browser: Browser, report: Report) -> None:
    graph = report.graph
    timeline = remat.simulate(graph, graph.plain_schedule)

    press(browser, "p")
    shown = readout(browser)
    op = graph.ops[timeline.peak_step or 0]
    assert f"run {timeline.peak_step + 1:,} of {OPS:,}" in shown
    assert remat.format_bytes(timeline.peak_bytes) in shown
    assert op.name in shown
    press(browser, Keys.ARROW_LEFT)
    before = graph.ops[timeline.peak_step - 1]
    assert before.name in readout(browser)
    assert f"layer {before.layer}" in readout(browser)
    assert before.source in readout(browser)
    press(browser, "+", "+")
    narrow = view(browser)
    assert narrow[1] - narrow[0] == pytest.approx(0.02)
    press(browser, Keys.ARROW_DOWN, Keys.END)
    assert f"planned, run {len(report.plan.schedule):,}" in readout(browser)
    assert view(browser)[1] == pytest.approx(1)
    press(browser, Keys.ESCAPE)
    assert view(browser) == (0, 1)
    assert "Point at the curve" in readout(browser)


def test_everything_is_reached_by_the_tab_key(browser: Browser) -> None:
    reached = []
    for _ in range(14):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        reached.append(browser.run("return document.activeElement.tagName.toLowerCase()"))

    assert reached[0] == "a"  # Past the heading.
    assert {"select", "button", "canvas", "circle"} <= set(reached)


def test_hovering_names_the_op_below_the_pointer(browser: Browser, report: Report) -> None:
    canvas = browser.driver.find_element(By.TAG_NAME, "canvas")
    ActionChains(browser.driver).move_to_element(canvas).perform()
    browser.settle()

    run = int(browser.run("return document.querySelector('canvas').dataset.step"))
    op = report.graph.ops[run]
    size = remat.simulate(report.graph, report.graph.plain_schedule).bytes[run]
    assert op.name in readout(browser)
    assert remat.format_bytes(size) in readout(browser)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_follow_the_system_and_can_be_read(started: Browser, page: Path, dark: bool) -> None:
    started.open(page, dark=dark)

    ratio = started.run(CONTRAST)
    background = pixels(started, "header").mean()
    assert (background < 80) == dark
    assert ratio >= 4.5
    for curve in ("--plain", "--planned", "--budget"):
        assert has_colour(started, "canvas", curve), curve


def test_colours_can_be_chosen(browser: Browser) -> None:
    browser.driver.find_element(By.ID, "scheme").send_keys("dark")
    browser.settle()

    assert pixels(browser, "header").mean() < 80


def test_a_step_by_categories_shows_their_colours(browser: Browser) -> None:
    assert not has_colour(browser, "canvas", "--c-activations")

    browser.driver.find_element(By.NAME, "show").send_keys("planned")
    browser.settle()

    assert has_colour(browser, "canvas", "--c-activations")
    assert has_colour(browser, "canvas", "--c-gradients")
    assert not browser.driver.find_element(By.CSS_SELECTOR, ".legend-totals").is_displayed()
    assert "activations: what the forward pass makes" in browser.driver.find_element(By.ID, "memory").text


def test_a_phone_shows_the_whole_width_without_scrolling_sideways(started: Browser, page: Path) -> None:
    started.open(page, width=390)

    assert started.run("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
    sizes = started.run(
        "return [...document.querySelectorAll('p, td, dd, small, button')]"
        ".map((element) => parseFloat(getComputedStyle(element).fontSize))"
    )
    assert min(sizes) >= 13
    heights = started.run("return [...document.querySelectorAll('#memory button')].map((e) => e.offsetHeight)")
    assert min(heights) >= 36
    assert has_colour(started, "canvas", "--budget")
    widths = started.run("return [...document.querySelectorAll('.largest')].map((e) => [e.offsetWidth, e.scrollWidth])")
    assert len(widths) == 2
    assert all(inner <= outer <= 390 for outer, inner in widths)
    assert "Pinch to zoom" in readout(started)


def test_points_of_the_frontier_are_named_when_focused(browser: Browser, report: Report) -> None:
    points = browser.driver.find_elements(By.CSS_SELECTOR, "#frontier circle")
    assert len(points) == len(report.frontier) + 1
    browser.run("arguments[0].focus()", points[-1])
    browser.settle()

    shown = readout(browser, "frontier")
    assert shown.startswith(f"This plan: budget {remat.format_bytes(report.plan.budget_bytes)}")
    assert f"{report.plan.overhead * 100:.2f} % more time" in shown


def test_between_two_budgets_nothing_is_shown_that_was_not_found_or_proved(browser: Browser) -> None:
    """The plan of the smaller budget is there up to the larger one, and the bound of the larger one below it."""

    def corners(line: str) -> list[list[float]]:
        path = browser.driver.find_element(By.CSS_SELECTOR, f"#frontier .{line}").get_attribute("d")
        return [[float(number) for number in corner.split(",")] for corner in path.removeprefix("M").split("L")]

    smaller, until, larger = corners("found")
    assert smaller[1] == until[1] < larger[1]
    assert smaller[0] < until[0] == larger[0]
    smaller, below, larger = corners("bound")
    assert smaller[0] == below[0] < larger[0]
    assert smaller[1] < below[1] == larger[1]


def test_layers_are_sorted_by_their_columns_and_shown_on_request(browser: Browser) -> None:
    table = browser.driver.find_element(By.CSS_SELECTOR, "#recomputed table")
    shown = [row for row in table.find_elements(By.CSS_SELECTOR, "tbody tr") if row.is_displayed()]
    assert len(shown) == 20
    browser.driver.find_element(By.CSS_SELECTOR, "button.more").click()
    rows = table.find_elements(By.CSS_SELECTOR, "tbody tr")
    assert all(row.is_displayed() for row in rows)
    assert len(rows) >= LAYERS

    def runs() -> list[int]:
        cells = table.find_elements(By.CSS_SELECTOR, "tbody td:nth-child(4)")
        return [int(cell.get_attribute("data-value")) for cell in cells]

    header = table.find_element(By.CSS_SELECTOR, "th:nth-child(4) button")
    header.click()
    assert runs() == sorted(runs(), reverse=True)
    header.click()
    assert runs() == sorted(runs())
    assert sum(runs()) > LAYERS


def test_without_a_plan_that_recomputes_there_is_one_curve(started: Browser, tmp_path: Path) -> None:
    graph = step(40)
    Report(graph, remat.plan(graph, "100%")).save(tmp_path / "plain.html")
    started.console()
    started.open(tmp_path / "plain.html")

    assert started.console() == []
    press(started, "p")
    assert readout(started).startswith("plain, run ")
    assert "Nothing: this plan is the plain step." in started.driver.find_element(By.ID, "recomputed").text
