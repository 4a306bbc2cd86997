"""The playground in a real browser against real servers: streams, colours, equal texts, keys, errors, policy,
phone.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import paceline.server
from tests.server.browser import IS_THERE, WHY_NOT, Browser
from tests.server.conftest import KEYS
from tests.server.harness import Server, start_server

FOLDER = Path(paceline.server.__file__).parent / "playground"
QUESTION = "Write a Python function that checks if a number is prime, then explain it line by line."
browsing = pytest.mark.skipif(not IS_THERE, reason=WHY_NOT)
ENTER, CONTROL, ESCAPE, RIGHT, DOWN, TAB = "\ue007", "\ue009", "\ue00c", "\ue014", "\ue015", "\ue004"
HOME = "\ue011"
RECORD = """window.lengths = []; new MutationObserver(() => {
  const text = document.querySelector('.turn.model .text'); if (text) window.lengths.push(text.textContent.length);
}).observe(document.getElementById('talk'), {childList: true, subtree: true, characterData: true});"""
COUNT = """window.counts = []; new MutationObserver(() => {
  const shown = [...document.querySelectorAll('.lane dl div:first-child dd')].map(e => Number(e.textContent) || 0);
  if (shown.length) window.counts.push([...shown, document.querySelectorAll('#plot [data-pass]').length]);
}).observe(document.getElementById('talk'), {childList: true, subtree: true, characterData: true});"""
# Texts whose contrast with what lies under them is less than 4.5, by WCAG's formula.
FAINT = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def eager_server() -> Iterator[Server]:
    """Three tokens are drafted every step, whatever they cost: `auto` may rightly draft nothing on a busy
    machine.
    """
    server = start_server(
        "default", "--speculative-config", '{"method": "eagle", "num_speculative_tokens": 3}'
    )
    yield server
    server.kill()


def watched(chromium: Browser, server: Server) -> Iterator[Browser]:
    """A new page of a server. Whatever a test does, the browser has nothing to complain about."""
    chromium.open(server.url)
    chromium.complaints()
    yield chromium
    assert chromium.complaints() == []
    chromium.script("localStorage.clear()")
    chromium.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.emulate()


@pytest.fixture
def page(chromium: Browser, default_server: Server) -> Iterator[Browser]:
    yield from watched(chromium, default_server)


@pytest.fixture
def eager_page(chromium: Browser, eager_server: Server) -> Iterator[Browser]:
    yield from watched(chromium, eager_server)


@pytest.fixture
def guarded(chromium: Browser, tiny_server: Server) -> Iterator[Browser]:
    """A page of the server that asks for a key, which the tab forgets at the end."""
    chromium.open(tiny_server.url, until="waiting")
    yield chromium
    chromium.script("sessionStorage.clear()")


def give_key(page: Browser, key: str) -> None:
    page.one("#key").send_keys(key, TAB)
    page.until(lambda: page.one("#server").get_attribute("data-status") == "ready", "the key to be taken")


def answer_of(server: Server, **body: Any) -> str:
    asked = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "top_p": 1,
        "max_tokens": 64,
        **body,
    }
    answered = server.post(
        "/v1/chat/completions", model=server.http.get("/v1/models").json()["data"][0]["id"], **asked
    )
    assert answered.status_code == 200, answered.text
    return str(answered.json()["choices"][0]["message"]["content"])


@browsing
def test_a_chat_turn_streams_in_colours(eager_page: Browser, eager_server: Server) -> None:
    eager_page.set("max-tokens", 192)
    eager_page.script(RECORD)
    eager_page.type(QUESTION, ENTER)
    eager_page.until_answered()
    lengths = [length for length in eager_page.script("return window.lengths") if length]
    assert len(set(lengths)) > 3  # it grew while it was written
    assert eager_page.text(".turn.model .text") == answer_of(eager_server, max_tokens=192)
    drafted, own = eager_page.all(".text .token.by-0"), eager_page.all(".text .token.by-target")
    assert drafted
    assert own
    assert drafted[0].value_of_css_property("background-color") != own[0].value_of_css_property(
        "background-color"
    )
    assert float(eager_page.text("#tau")) > 1
    assert float(eager_page.text("#speed")) > 0
    assert eager_page.text("#alpha").endswith("%")
    assert eager_page.all("#bars li")
    assert "eagle" in eager_page.text("#legend")
    assert re.search(
        r"\d %", eager_page.text(".tree")
    )  # a guess of the drafter: at full speed p is not recorded
    assert re.search(
        r"192 tokens in \d+ passes · [\d.]+ tokens/s · reached max tokens", eager_page.text(".summary")
    )


@browsing
def test_a_token_tells_its_numbers_by_mouse_and_by_keys(eager_page: Browser) -> None:
    from selenium.webdriver import ActionChains

    eager_page.one("#watch").click()
    eager_page.set("max-tokens", 48)
    eager_page.type(QUESTION, ENTER)
    eager_page.until_answered()
    token = next(
        each for each in eager_page.all(".text .token.by-0") if each.text.strip()
    )  # a line end has no place to point at
    ActionChains(eager_page.driver).move_to_element(token).perform()
    eager_page.until(lambda: eager_page.one("#card").is_displayed(), "the card")
    card = eager_page.one("#card").text
    assert "proposed by eagle" in card
    assert re.search(r"Pass \d+: [1-9]\d* of \d+ drafted tokens? kept", card)
    assert re.search(r"p, the model's\n[01]\.\d{3}\nq, the drafter's\n1, not sampled", card)
    assert "✓" in card
    assert (
        len(eager_page.all(".token.same-pass")) >= 2
    )  # the accepted prefix and the model's own token after it
    eager_page.one(".turn.model .text").send_keys(RIGHT)
    first = eager_page.script("return document.activeElement.textContent")
    assert eager_page.all(".token.chosen")[0].get_attribute("textContent") == first
    assert eager_page.one("#card").is_displayed()
    eager_page.driver.switch_to.active_element.send_keys(DOWN)
    assert eager_page.script("return document.activeElement.textContent") is not None
    eager_page.driver.switch_to.active_element.send_keys(ESCAPE)
    assert not eager_page.one("#card").is_displayed()


@browsing
def test_a_race_plays_both_again_and_the_texts_are_equal(eager_page: Browser) -> None:
    eager_page.set("max-tokens", 96)
    eager_page.script(COUNT)
    eager_page.type(QUESTION, CONTROL, ENTER)
    eager_page.until_answered()
    texts = eager_page.script("return [...document.querySelectorAll('.lane .text')].map(e => e.textContent)")
    assert len(texts) == 2
    assert texts[0] == texts[1] != ""
    assert not eager_page.all(".token.later")
    assert "Identical: the same text, token for token." in eager_page.text(".verdict.same")
    assert re.fullmatch(r"\d+\.\d\d×", eager_page.text(".verdict .speedup"))
    assert eager_page.text("#speedup") == eager_page.text(".verdict .speedup")
    drafted, plain = eager_page.all(".lane")
    assert drafted.find_elements("css selector", ".token.by-0")
    assert not plain.find_elements("css selector", ".token.by-0")
    rows = "return [...document.querySelectorAll('.lane')].map(e => [...e.querySelectorAll('dd')].map(d => d.textContent))"
    (num, _, passes, tau), (num_plain, _, passes_plain, tau_plain) = eager_page.script(rows)
    assert num == num_plain == passes_plain == "96"
    assert (tau, tau_plain) == (f"{96 / int(passes):.2f}", "1.00")
    counts = eager_page.script("return window.counts")
    for lane in (0, 1, 2):  # the counters and the plot ran, and in the replay from the beginning again
        assert len({count[lane] for count in counts}) > 5
        assert any(after[lane] < before[lane] for before, after in itertools.pairwise(counts))


@browsing
def test_without_motion_a_drawn_race_is_replayed_only_when_asked(eager_page: Browser) -> None:
    eager_page.emulate(prefers_reduced_motion="reduce")
    eager_page.set("max-tokens", 48)
    eager_page.set("temperature", 0.9)
    eager_page.set("drafter", "off")  # a race has drafts nevertheless
    eager_page.script(COUNT)
    eager_page.type(QUESTION, CONTROL, ENTER)
    eager_page.until_answered()
    assert "Both with seed" in eager_page.text(".turn.model")
    assert eager_page.all(".verdict.same")
    counts = eager_page.script("return window.counts")
    assert eager_page.all(".lane:first-child .token.by-0")
    assert all(before[0] <= after[0] for before, after in itertools.pairwise(counts))
    slow_motion = eager_page.all(".race-actions button")[1]
    click = "arguments[0].click(); return document.querySelector('.verdict').textContent"
    assert "slower" in eager_page.script(click, slow_motion)
    eager_page.one("body").send_keys(ESCAPE)
    eager_page.until_answered()
    assert eager_page.all(".verdict.same")
    assert not eager_page.all(".token.later")


@browsing
def test_the_tree_of_every_pass_tells_how_the_text_came_about(eager_page: Browser) -> None:
    """By keyboard: kept tokens and the model's own, pass after pass, are the text."""
    eager_page.one("#watch").click()
    eager_page.set("max-tokens", 48)
    eager_page.type(QUESTION, ENTER)
    eager_page.until_answered()
    for fate in ("accepted", "rejected", "own"):  # the pass shown first has all three
        assert eager_page.all(f".tree .node.{fate}"), fate
    assert re.search(r"eagle drafted \d tokens: [1-9] kept, 1 dropped", eager_page.text(".pass-words"))
    label = str(eager_page.one(".tree").get_attribute("aria-label"))
    assert re.search(r"” dropped, by eagle, p \d", label)
    slider = eager_page.one(".pass-head input")
    slider.send_keys(HOME)
    total = int(str(slider.get_attribute("max")))
    assert f"in {total} passes" in eager_page.text(".summary")
    titles = "return [...document.querySelectorAll('.tree .accepted title, .tree .own title')].map(e => e.textContent)"
    said, num_kept = "", 0
    for number in range(1, total + 1):
        assert eager_page.text(".pass-head output") == f"{number} of {total}"
        found = [
            re.fullmatch(r"“(.*)” (kept|written).*", title, re.DOTALL) for title in eager_page.script(titles)
        ]
        parts = [part for part in found if part is not None]
        assert 1 <= len(parts) == len(found)
        marked = eager_page.script(
            "return [...document.querySelectorAll('.of-pass')].map(e => e.textContent)"
        )
        assert "".join(marked).strip() == "".join(part[1] for part in parts).strip()
        said += "".join(part[1] for part in parts)
        num_kept += sum(part[2] == "kept" for part in parts)
        slider.send_keys(RIGHT)
    assert said == eager_page.text(".turn.model .text")
    assert num_kept == len(eager_page.all(".text .token.by-0"))
    assert len(eager_page.all("#plot [data-pass]")) == total
    eager_page.script(
        "document.querySelectorAll('#plot [data-pass]')[2].dispatchEvent(new Event('click', {bubbles: true}))"
    )
    assert eager_page.text(".pass-head output") == f"3 of {total}"
    eager_page.all(".pass-head button")[0].click()
    assert eager_page.text(".pass-head output") == f"2 of {total}"
    controls = [each for each in eager_page.all("button, input, summary, .tree-box") if each.is_displayed()]
    assert all(each.accessible_name for each in controls)
    label = str(eager_page.one("#plot svg").get_attribute("aria-label"))
    assert f"{total} passes; on average {eager_page.text('#tau')} tokens a pass" in label


@browsing
def test_a_seed_gives_the_texts_that_the_api_gives(page: Browser, default_server: Server) -> None:
    for name, value in {
        "max-tokens": 40,
        "temperature": 0.8,
        "seed": 7,
        "top-k": 50,
        "system": "You are a cyclist.",
    }.items():
        page.set(name, value)
    page.set("k", 3)
    page.type(QUESTION, ENTER)
    page.until_answered()
    messages = [{"role": "system", "content": "You are a cyclist."}, {"role": "user", "content": QUESTION}]
    assert page.text(".turn.model .text") == answer_of(
        default_server, messages=messages, max_tokens=40, temperature=0.8, seed=7, top_k=50
    )
    page.set("drafter", "off")
    page.type("Thanks!", ENTER)
    page.until_answered(2)
    assert page.text("#alpha") == "–"
    assert not page.all(".turn.model:last-child .token.by-0")


@browsing
def test_escape_stops_and_frees_the_request(page: Browser, default_server: Server) -> None:
    page.set("max-tokens", 4000)
    page.type("Tell me a very long story about a river.", ENTER)
    page.until(lambda: len(page.text(".turn.model .text")) > 20, "words")
    page.type(ESCAPE)
    page.until_answered()
    assert "stopped by you" in page.text(".summary")
    default_server.settled()
    page.one("#new-chat").click()
    assert page.one("#welcome").is_displayed()
    assert not page.all(".turn")


@browsing
def test_shift_enter_is_a_new_line_and_an_empty_message_is_not_sent(page: Browser) -> None:
    page.type("one", "\ue008" + ENTER, "\ue000", "two")
    assert page.one("#prompt").get_attribute("value") == "one\ntwo"
    page.one("#prompt").clear()
    page.one("#send").click()
    assert not page.all(".turn")


@browsing
def test_a_phone_has_everything_and_nothing_sticks_out(page: Browser) -> None:
    page.resize(360, 740)
    page.emulate(prefers_reduced_motion="reduce")
    page.one("#settings-open").click()
    assert page.one("#drafter").is_displayed()
    page.set("max-tokens", 32)
    page.one("#settings-close").click()
    assert not page.one("#drafter").is_displayed()
    page.type(QUESTION)
    page.one("#race").click()
    page.until_answered()
    assert "the same text" in page.text(".verdict.same")
    assert (
        len(page.all(".tree .node")) >= 2
    )  # the model's own token is not among them where the text ended within the draft
    assert page.script("return document.documentElement.scrollWidth") <= 360
    inside = "return [...document.querySelectorAll('button, textarea, .text, .numbers dd, .lane dd, .plot svg, .pass-head *, .tree-box')].filter(e => e.offsetParent)"
    assert page.script(
        inside + ".every(e => e.getBoundingClientRect().left >= 0 && e.getBoundingClientRect().right <= 361)"
    )
    token = page.all(".text .token.by-target")[0]
    page.script("arguments[0].scrollIntoView({block: 'center'})", token)
    token.click()
    box = page.script(
        "const b = document.getElementById('card').getBoundingClientRect(); return [b.left, b.right, b.bottom]"
    )
    assert box[0] >= 0
    assert box[1] <= 360
    assert box[2] <= 740


@browsing
def test_dark_and_light_follow_the_system_until_told_otherwise(page: Browser) -> None:
    def ground() -> str:
        return str(page.one("body").value_of_css_property("background-color"))

    page.emulate(prefers_color_scheme="light")
    light = ground()
    page.emulate(prefers_color_scheme="dark")
    dark = ground()
    assert light != dark
    for expected in (light, dark, dark):  # light, dark, auto again
        page.one("#theme").click()
        assert ground() == expected


@browsing
def test_every_text_can_be_read_in_light_and_dark(eager_page: Browser) -> None:
    eager_page.set("max-tokens", 32)
    eager_page.emulate(prefers_reduced_motion="reduce")
    eager_page.script("document.querySelector('details').open = true")
    welcome = {theme: faint_in(eager_page, theme) for theme in ("light", "dark")}
    eager_page.type(QUESTION, CONTROL, ENTER)
    eager_page.until_answered()
    assert eager_page.all(".node.rejected")
    raced = {theme: faint_in(eager_page, theme) for theme in ("light", "dark")}
    assert not any((*welcome.values(), *raced.values())), (welcome, raced)
    eager_page.script("document.querySelector('.composer .hint').style.color = '#999'")
    assert faint_in(eager_page, "light")  # the check can fail


def faint_in(page: Browser, theme: str) -> Any:
    page.emulate(prefers_reduced_motion="reduce", prefers_color_scheme=theme)
    return page.script(FAINT)


@browsing
def test_settings_outlive_the_page_and_the_key_does_not_join_them(
    page: Browser, default_server: Server
) -> None:
    for name, value in {"max-tokens": 33, "temperature": 0.6, "k": 2, "drafter": "suffix"}.items():
        page.set(name, value)
    page.one("#watch").click()
    page.one("#key").send_keys("a-secret", TAB)
    page.open(default_server.url)
    names = ("max-tokens", "temperature", "k", "drafter")
    assert [page.one(f"#{name}").get_property("value") for name in names] == ["33", "0.6", "2", "suffix"]
    assert page.one("#watch").is_selected()
    assert "a-secret" not in page.script("return JSON.stringify(localStorage) + location.href")
    page.script("arguments[0].click()", page.one("#settings-reset"))
    page.script("sessionStorage.clear()")
    page.open(default_server.url)
    assert [page.one(f"#{name}").get_property("value") for name in names][::3] == ["256", "auto"]
    assert page.text("#k-shown") == "as many as pay"


@browsing
def test_stop_ends_a_race_and_escape_closes_the_list_of_keys_alone(
    page: Browser, default_server: Server
) -> None:
    page.set("max-tokens", 4000)
    page.type("Tell me a very long story about a river.", CONTROL, ENTER)
    page.until(lambda: len(page.text(".lane .text")) > 20, "words")
    page.one("#keys-open").click()
    assert page.one("#keys").is_displayed()
    page.driver.switch_to.active_element.send_keys(ESCAPE)
    assert not page.one("#keys").is_displayed()
    assert page.one("#talk").get_attribute("aria-busy") == "true"
    page.one("#stop").click()
    page.until_answered()
    assert "nothing to compare" in page.text(".verdict")
    default_server.settled()


@browsing
def test_every_control_has_a_name_and_the_keyboard_reaches_all(page: Browser) -> None:
    page.script("document.querySelector('details').open = true")
    controls = [
        element for element in page.all("button, input, select, textarea, summary") if element.is_displayed()
    ]
    assert all(element.accessible_name for element in controls)
    expected, reached = {element.id for element in controls}, set()
    page.one("#new-chat").send_keys("")
    for _ in range(3 * len(controls)):
        reached.add(page.driver.switch_to.active_element.id)
        page.driver.switch_to.active_element.send_keys(TAB)
    assert expected <= reached


@browsing
def test_a_broken_policy_would_be_noticed(chromium: Browser, default_server: Server) -> None:
    chromium.open(default_server.url)
    chromium.complaints()
    chromium.script("document.body.setAttribute('style', 'color: red')")
    chromium.until(chromium.complaints, "a complaint")


@browsing
def test_the_key_is_asked_for_and_kept_in_the_tab_alone(guarded: Browser) -> None:
    assert "needs an API key" in guarded.text("#server")
    assert guarded.script("return document.activeElement.id") == "key"
    guarded.type("Hello", ENTER)
    guarded.until(lambda: guarded.all(".error"), "an error")
    assert "asks for an API key" in guarded.text(".error")
    give_key(guarded, KEYS[1])
    assert [option.get_attribute("value") for option in guarded.all("#drafter option")] == [
        "auto",
        "ngram",
        "suffix",
        "off",
    ]
    guarded.set("max-tokens", 8)
    guarded.set("drafter", "ngram")
    guarded.one(".error button").click()
    guarded.until_answered()
    assert re.match(r"\d tokens", guarded.text(".summary"))
    assert KEYS[1] not in guarded.driver.current_url
    assert KEYS[1] not in guarded.script("return JSON.stringify(localStorage) + document.cookie")
    assert KEYS[1] in guarded.script("return JSON.stringify(sessionStorage)")


@browsing
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tokens_that_are_parts_of_characters_leave_the_text_whole(
    guarded: Browser, tiny_server: Server, seed: int
) -> None:
    """A random model at a high temperature writes bytes that are no characters, and characters in several
    tokens.
    """
    give_key(guarded, KEYS[0])
    for name, value in {"max-tokens": 60, "temperature": 2, "seed": seed}.items():
        guarded.set(name, value)
    guarded.type(QUESTION, ENTER)
    guarded.until_answered()
    assert guarded.text(".turn.model .text") == answer_of(
        tiny_server, max_tokens=60, temperature=2, seed=seed
    )


@browsing
def test_a_server_that_is_gone_is_told_in_plain_words(chromium: Browser, wide_folder: Path) -> None:
    server = start_server(str(wide_folder))
    chromium.open(server.url)
    server.kill()
    chromium.type("Hello?", ENTER)
    chromium.until(lambda: chromium.all(".error"), "an error")
    assert "The server cannot be reached" in chromium.text(".error")
    assert not chromium.one(".passes").is_displayed()  # nothing was written
    chromium.until(lambda: "no server answers" in chromium.text("#server"), "the header to say so")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_has_nothing_inline_and_nothing_from_outside() -> None:
    tags = Tags()
    tags.feed((FOLDER / "index.html").read_text(encoding="utf-8"))
    for tag, attributes in tags.found:
        assert tag != "style"
        assert tag != "script" or attributes.get("src")
        assert not any(name == "style" or name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("src", "href"):
            if attributes.get(name):
                assert (FOLDER / str(attributes[name]).removeprefix("/playground/")).is_file(), attributes[
                    name
                ]
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]+/|@import|\beval\(|innerHTML|new Function", text), (
            path
        )
        assert len(text.splitlines()) <= 400


def test_every_module_that_is_imported_is_there() -> None:
    scripts = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js")}
    imported = {name for text in scripts.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert imported | {"app.js", "theme.js"} == set(scripts)


def test_the_page_is_served_under_its_policy(default_server: Server) -> None:
    for path, kind in {
        "/": "text/html",
        "/playground/app.js": "text/javascript",
        "/playground/style.css": "text/css",
    }.items():
        answer = default_server.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    assert default_server.http.get("/playground/nothing.js").status_code == 404
    assert default_server.http.get("/playground/..%2fapp.py").status_code == 404
    assert json.loads(default_server.http.get("/health").text)["status"] == "ok"
