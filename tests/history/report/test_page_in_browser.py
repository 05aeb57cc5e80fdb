"""The page in a real browser: what is hovered was saved, filters find what they should, keys reach everything."""

import dataclasses
import json
import math
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from tests.history.report.browsing import credit, open_page, prefer_colours, set_device, wait_until, why_no_browser
from tests.history.report.make_big_run import (
    HOSTILE,
    byte_level,
    rollout_of,
    write_around,
    write_big_run,
    write_hostile_run,
    write_step,
)
from tests.history.report.trained import write_history
from trl_grpo_ext.completions import turn_numbers
from trl_grpo_ext.history.report import load_run, load_runs
from trl_grpo_ext.history.report.page import visible, write_page
from trl_grpo_ext.testing.builders import turns_between

NO_BROWSER = why_no_browser()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_BROWSER is not None, reason=NO_BROWSER or "")]

MEGABYTES_20 = 20 * 10**6


def empty_logs(driver: Any) -> None:
    driver.get_log("browser")
    driver.get_log("performance")


def assert_silent(driver: Any) -> None:
    """Nothing on the console, no script of a completion has run, and nothing but the page itself was asked for."""
    assert driver.get_log("browser") == []
    assert driver.execute_script("return typeof window.pwned") == "undefined"
    sent = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
    assert {address for address in asked if not address.startswith(("file:///", "about:", "chrome:", "data:"))} == set()
    assert sum(address.startswith("file:///") for address in asked) <= 1


def rows_of(run: Path) -> list[dict[str, Any]]:
    """All records of a run, with the outcome of `right_answer`, as the files have them."""
    rows: list[dict[str, Any]] = []
    for file in sorted((run / "token_records").iterdir()):
        for row in pyarrow.parquet.read_table(file).to_pylist():
            rows.append({**row, "outcome": dict(row["outcomes"])["right_answer"], "rewards": dict(row["rewards"])})
    return rows


def key(row: dict[str, Any]) -> str:
    return f"{row['step']}/{row['group']}/{row['member']}"


def choose(driver: Any, name: str, value: str) -> None:
    """Choose a value as a user does, and wait until the page has followed."""
    driver.execute_script(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('change', {bubbles: true}))",
        *(name, value),
    )


def found(driver: Any) -> list[str]:
    """The keys of all results, after showing the last page of them."""
    wait_until(driver, "return !document.getElementById('status').textContent.startsWith('Searching')")
    time.sleep(0.1)
    while driver.execute_script(
        "const m = document.getElementById('more-results'); if (!m.hidden) m.click(); return !m.hidden"
    ):
        pass
    keys: list[str] = driver.execute_script(
        "return [...document.querySelectorAll('#results [data-key]')].map((b) => b.dataset.key)"
    )
    said = driver.execute_script("return document.getElementById('status').textContent")
    if keys:
        assert said == f"{len(keys)} of 500 completions."
    return keys


HOVER = """
const card = document.querySelector(`.card[data-member="${arguments[0]}"]`);
const span = card.querySelectorAll('.token')[arguments[1]];
if (arguments[2] === 'focus') span.focus();
else span.dispatchEvent(new MouseEvent('mouseover', {bubbles: true}));
const tip = document.getElementById('tip');
return {
  hidden: tip.hidden, described: span.getAttribute('aria-describedby'), kind: span.className,
  lines: [...tip.querySelectorAll('tr')].map((tr) => [...tr.cells].map((cell) => cell.textContent))
    .map(([name, ...values]) => [name, values]),
};
"""


def shown(value: float) -> float:
    """Four digits of the five that the page has of a float32."""
    stored = f"{struct.unpack('f', struct.pack('f', value))[0]:.5g}"
    return float(f"{float(stored):.4g}")


def read(text: str) -> float:
    return float(text.replace("\u2212", "-"))


OVERFLOWING = """
return [...document.querySelectorAll('.card, .card *, #prompt, #results *')].filter((e) => {
  const inside = e.closest('.card, #prompt, #results');
  if (e.matches('.token') && inside.dataset.member === String(arguments[0])) return false;
  const card = inside.getBoundingClientRect();
  const box = e.getBoundingClientRect();
  return box.width > 0 && (box.right > card.right + 1 || box.left < card.left - 1);
}).map((e) => e.className + ': ' + e.textContent.slice(0, 40));
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 500 completions of 500 tokens each, and their page."""
    folder = tmp_path_factory.mktemp("big")
    for seed, name in enumerate(("first", "second")):
        write_big_run(folder / name, seed=seed)
    write_page(load_runs([folder / "first", folder / "second"]), folder / "report.html")
    assert (folder / "report.html").stat().st_size < MEGABYTES_20
    return folder


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    run = write_hostile_run(folder / "run <img src=x onerror=window.pwned=9>")
    write_page([load_run(run)], folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def opened(chromium: Any, big: Path) -> Iterator[Any]:
    """The big report, freshly opened; afterwards nothing may have gone wrong."""
    yield from freshly(chromium, big / "report.html")


@pytest.fixture
def attacked(chromium: Any, hostile_page: Path) -> Iterator[Any]:
    yield from freshly(chromium, hostile_page)


def freshly(driver: Any, page: Path) -> Iterator[Any]:
    """Open a page with an empty log before it."""
    set_device(driver, 1280, 900)
    prefer_colours(driver, "light")
    empty_logs(driver)
    open_page(driver, page)
    yield driver
    assert_silent(driver)


def test_a_token_shows_the_numbers_of_the_parquet_file(opened: Any, big: Path) -> None:
    # Of a thousand completions only the group in view is in the page.
    assert opened.execute_script("return document.querySelectorAll('.card').length") == 10
    assert opened.execute_script("return document.querySelectorAll('.card .token').length") <= 10 * 500
    rows = {key(row): row for row in rows_of(big / "first")}
    compared = 0
    for member, how in ((0, "hover"), (4, "focus")):
        row = rows[f"100/0/{member}"]
        places = parts(row)
        for number in (0, 1, 7, len(places) - 1, next(n for n, part in enumerate(places) if len(part) > 1)):
            told = opened.execute_script(HOVER, member, number, how)
            assert told["hidden"] is False
            assert told["described"] == "tip"
            lines = dict(told["lines"])
            for column, place in enumerate(places[number][:4]):
                wanted = {name: values[place] for name, values in zip(row["stages"], row["advantages"], strict=True)}
                wanted |= {"advantage in the loss": row["advantage"][place], "weight in the loss": row["weight"][place]}
                wanted |= {"log-probability": row["logp"][place], "entropy (nats)": row["entropy"][place]}
                for name, value in wanted.items():
                    assert read(lines[name][column]) == shown(value), (name, place)
                    compared += 1
                product = row["advantage"][place] * row["weight"][place]
                assert read(lines["advantage × weight"][column]) == pytest.approx(product, rel=1e-3)
            total = math.fsum(row["advantage"][p] * row["weight"][p] for p in places[number] if row["live"][p])
            sign = {True: "up", False: "down"}[total > 0] if total else ""
            assert (sign in told["kind"].split()) if sign else not {"up", "down"} & set(told["kind"].split())
    assert compared >= 60
    # A step that was not trained on says so.
    choose(opened, "step", "1")
    wait_until(opened, "return document.getElementById('prompt-title').textContent.includes('step 40')")
    assert "Not trained on" in opened.execute_script("return document.querySelector('.card').textContent")
    lines = dict(opened.execute_script(HOVER, 0, 0, "hover")["lines"])
    assert lines["weight in the loss"] == ["–"]
    assert read(lines["centred"][0]) != 0


def parts(row: dict[str, Any]) -> list[list[int]]:
    """Which tokens share an element: those that wrote bytes of the same character."""
    grouped: list[list[int]] = []
    cursor = 0
    for place, (start, end) in enumerate(zip(row["starts"], row["ends"], strict=True)):
        if grouped and start < end <= cursor:
            grouped[-1].append(place)
        else:
            grouped.append([place])
        cursor = max(cursor, end)
    return grouped


def expected(rows: list[dict[str, Any]], name: str, reward: str = "right_answer", right_from: float = 1.0) -> list[str]:
    def value(row: dict[str, Any]) -> float | None:
        return row["rewards"][reward]  # type: ignore[no-any-return]

    longest = sorted(rows, key=lambda row: -len(row["token_ids"]))[: math.ceil(len(rows) / 10)]
    unread = {"no_answer", "unparseable_reference"}
    kept = {
        "wrong-rewarded": [r for r in rows if value(r) is not None and value(r) < right_from and credit(r) > 0],
        "right-punished": [r for r in rows if value(r) is not None and value(r) >= right_from and credit(r) < 0],
        "longest": [row for row in rows if any(row is other for other in longest)],
        "truncated": [row for row in rows if row["truncated"]],
        "unparseable": [r for r in rows if value(r) is None or (reward == "right_answer" and r["outcome"] in unread)],
    }
    return [key(row) for row in kept[name]]


def test_filters_and_search_find_exactly_what_python_finds(opened: Any, big: Path) -> None:
    rows = rows_of(big / "second")
    choose(opened, "run", "1")
    wait_until(opened, "return document.getElementById('step').options.length === 5")
    for reward in ("right_answer", "think_format"):
        choose(opened, "right", reward)
        for name in ("wrong-rewarded", "right-punished", "longest", "truncated", "unparseable"):
            choose(opened, "filter", name)
            wanted = expected(rows, name, reward)
            assert 0 < len(wanted) < 500 or reward == "think_format", name
            assert found(opened) == wanted, name
    choose(opened, "from", "0.5")  # of the reward at hand alone
    for name in ("wrong-rewarded", "right-punished"):
        choose(opened, "filter", name)
        wanted = expected(rows, name, "think_format", 0.5)
        assert wanted, name
        assert found(opened) == wanted, name
    choose(opened, "right", "right_answer")
    assert opened.execute_script("return document.getElementById('from').value") == "1"
    choose(opened, "filter", "all")
    for text in ("naïve 30", "WAIT CHECK", "\\frac{1}{2} half", "not there at all"):
        opened.execute_script(
            "const s = document.getElementById('search'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
            text,
        )
        time.sleep(0.3)
        wanted = [key(row) for row in rows if text.lower() in row["completion"].lower()]
        assert found(opened) == wanted, text
        assert bool(wanted) == (text != "not there at all")


def test_browser_orders_results_with_links(opened: Any, big: Path) -> None:
    truncated = [row for row in rows_of(big / "first") if row["truncated"]]
    choose(opened, "filter", "truncated")
    choose(opened, "sort", "reward-up")
    wanted = [key(row) for row in sorted(truncated, key=lambda row: row["reward"])]
    assert found(opened) == wanted
    opened.execute_script('document.querySelector(`[data-key="${arguments[0]}"]`).click()', wanted[3])
    wait_until(opened, "return document.activeElement.classList.contains('card')")
    assert opened.execute_script("return document.activeElement.dataset.member") == wanted[3].split("/")[2]


def test_everything_can_be_reached_by_keys(opened: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    def press(*keys: str) -> None:
        ActionChains(opened).send_keys(*keys).perform()
        time.sleep(0.05)

    def focused() -> dict[str, Any]:
        return opened.execute_script(  # type: ignore[no-any-return]
            "const e = document.activeElement; return {kind: e.className, id: e.id,"
            " member: e.closest('.card')?.dataset.member,"
            " place: [...(e.parentElement?.children ?? [])].indexOf(e), outline: getComputedStyle(e).outlineStyle}"
        )

    press("/")
    assert focused()["id"] == "search"
    press("?", "n")  # in a field they are text
    assert opened.execute_script("return document.getElementById('search').value") == "?n"
    opened.execute_script("document.querySelector('.card').focus()")
    press(Keys.ARROW_RIGHT)
    press(Keys.ARROW_RIGHT)
    press(Keys.ARROW_LEFT)
    assert focused()["member"] == "1"
    assert focused()["outline"] == "solid"
    title = "return document.getElementById('prompt-title').textContent.includes(arguments[0])"
    for pressed, where in ((Keys.ARROW_UP, "step 80"), ("n", "Prompt 1 "), ("p", "Prompt 0 "), ("]", "step 100")):
        press(pressed)
        wait_until(opened, title, where)
    wait_until(opened, "return document.activeElement.classList.contains('card')")
    press(Keys.ENTER)
    assert focused()["kind"].startswith("token")
    assert opened.execute_script("return document.getElementById('tip').hidden") is False
    before = focused()["place"]
    press(Keys.ARROW_RIGHT)
    assert focused()["place"] == before + 1
    assert focused()["outline"] == "solid"
    press(Keys.ESCAPE)
    assert focused()["kind"] == "card"
    assert opened.execute_script("return document.getElementById('tip').hidden") is True
    press("?")
    assert opened.execute_script("return document.getElementById('keys').open") is True
    press(Keys.ESCAPE)
    assert opened.execute_script("return document.getElementById('keys').open") is False


def test_hostile_completions_are_text_and_nothing_runs(attacked: Any) -> None:
    texts = attacked.execute_script(
        "return [...document.querySelectorAll('.card')]"
        ".map((c) => [c.dataset.member, c.querySelector('.tokens').textContent])"
    )
    seen = {int(member): text for member, text in texts}
    assert sorted(seen) == list(range(len(HOSTILE)))
    for member, text in enumerate(HOSTILE):
        whole = visible(text + "\ufffd\u00b7").replace("\n", "\u21b5\n")  # half a character, and the token that ends it
        if len(text) < 1500:
            assert seen[member].replace("\u00b7", "") == whole.replace("\u00b7", ""), text
        else:
            assert whole.startswith(seen[member])
            assert len(seen[member]) <= 6000
    for member in range(len(HOSTILE)):
        assert attacked.execute_script(HOVER, member, 0, "hover")["hidden"] is False
    foreign = "return document.querySelectorAll('.card script, .card img, .card svg, .card iframe').length"
    assert attacked.execute_script(foreign) == 0


def test_browser_keeps_hostile_text_in_its_card(attacked: Any) -> None:
    choose(attacked, "filter", "longest")
    # 600 marks on one letter cannot be broken: they are cut off at the edge of their stretch.
    marks = next(number for number, text in enumerate(HOSTILE) if text.startswith("Z\u0300"))
    for width in (375, 1280):
        set_device(attacked, width, 812, mobile=width < 500)
        assert attacked.execute_script("return document.documentElement.scrollWidth") == width
        assert attacked.execute_script(OVERFLOWING, marks) == []
    kinds = attacked.execute_script(
        "return [...document.querySelectorAll('.stretch')].map((e) => getComputedStyle(e)).map("
        "(s, i) => [s.overflow, s.unicodeBidi, document.querySelectorAll('.stretch')[i].dir])"
    )
    assert {tuple(kind) for kind in kinds} == {("hidden", "isolate", "auto")}
    member = next(number for number, text in enumerate(HOSTILE) if text.startswith("ש"))
    direction = (
        'return getComputedStyle(document.querySelector(`.card[data-member="${arguments[0]}"] .stretch`)).direction'
    )
    assert attacked.execute_script(direction, member) == "rtl"


def test_a_finding_leads_to_its_figure_and_its_completions(chromium: Any, big: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(big / "first", run)
    steps = range(1, 101)
    write_history(run, [{"step": n, "reward": n / 100, "raw_reward": 1 - n / 100} for n in steps])
    page = tmp_path / "report.html"
    write_page(load_runs([big / "second", run]), page)
    for driver in freshly(chromium, page):
        driver.execute_script("document.querySelector('#findings button').click()")
        wait_until(driver, "return document.querySelectorAll('#results [data-key]').length > 0")
        state = "return ['run', 'step', 'filter'].map((id) => document.getElementById(id).value)"
        assert driver.execute_script(state) == ["1", "4", "wrong-rewarded"]
        assert found(driver) == expected(rows_of(run), "wrong-rewarded")
        assert driver.execute_script("return document.getElementById('completions').getBoundingClientRect().top < 200")
        for width in (1280, 375):
            set_device(driver, width, 812)
            assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_turns_are_set_apart_with_their_credit_and_their_errors(chromium: Any, tmp_path: Path) -> None:
    tokenizer = byte_level()
    said = ["call(1)", HOSTILE[0], " it is 5", HOSTILE[3], "done"]
    parts_of = [tokenizer.encode(text, add_special_tokens=False) for text in said]
    wrote = [number % 2 == 0 for number, ids in enumerate(parts_of) for _ in ids]
    plain = [token for ids in parts_of for token in ids]
    rollout = rollout_of(["?"], [plain, plain], tokenizer, torch.tensor([[1.0], [0.0]]), ["right"])
    wrote_B_T = torch.tensor([wrote, [True] * len(wrote)])
    pieces = ["x"] * len(wrote)
    rollout = dataclasses.replace(
        rollout,
        turns_B_T=turn_numbers(wrote_B_T),
        turns=lambda row: turns_between(wrote_B_T[row].tolist(), pieces, failed=[1] if row == 0 else []),
    )
    write_around(tmp_path / "run", 20, ["right"])
    row = pyarrow.parquet.read_table(write_step(tmp_path / "run", 20, rollout)).to_pylist()[0]
    page = tmp_path / "report.html"
    write_page([load_run(tmp_path / "run")], page)
    for driver in freshly(chromium, page):
        heads = driver.execute_script(
            "return [...document.querySelectorAll('.card')].map((card) =>"
            " [...card.querySelectorAll('.turn')].map((head) => [head.textContent, head.className]))"
        )
        assert heads[1] == []  # one turn, and nothing failed: as without tools
        texts, kinds = zip(*heads[0], strict=True)
        used = list(zip(row["advantage"], row["weight"], row["turns"], strict=True))
        credits = [sum(a * w for a, w, turn in used if turn == number) for number in range(3)]
        assert kinds == ("turn", "turn result", "turn failed", "turn result", "turn")
        assert texts[1] == texts[3] == "not the model’s"
        for number, text in enumerate(texts[::2]):
            name, _, value = text.removesuffix(", a tool call failed").partition(", credit ")
            assert name == f"turn {number + 1}"
            assert read(value) == pytest.approx(shown(credits[number]), rel=1e-3)
        assert texts[2].endswith(", a tool call failed")
        results = driver.execute_script(
            "return [...document.querySelectorAll('.card:first-of-type .token.result')].map((one) => one.textContent)"
        )
        assert "".join(results) == visible(said[1]) + visible(said[3])
        assert driver.execute_script("return window.pwned === undefined")
