"""The page in a real browser: typing, errors, pictures, links, colours, narrow and wide screens.

``ATTNDSL_SHOTS=FOLDER`` keeps the screenshots to look at; docs/play.png is one of them.
"""

import os
import re
import statistics
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
from support.browser import CHROMIUM, DRIVER, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no Chromium here: apt-get install -y chromium chromium-driver",
    ),
]
SETTLED = "return document.body.dataset.state === 'right'"
PROGRAM = "param w: int = 20\nmask = causal() and q - kv < w"
CLIPBOARD = ["clipboardReadWrite", "clipboardSanitizedWrite"]
MOST_MEDIAN, MOST_WORST = 150, 1500
"""Milliseconds from a typed character to a new picture. The worst is that of a busy machine."""


@pytest.fixture(scope="module")
def address():
    """Where ``attndsl play`` serves its page."""
    command = [sys.executable, "-m", "attndsl", "play", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        line = server.stdout.readline()
        yield re.search(r"http://127\.0\.0\.1:\d+/", line)[0]
        server.terminate()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        found.resize(1400, 1000)
        yield found


@pytest.fixture
def page(browser, address):
    """``page(program)``: the browser, at the page with a program whose picture is there."""

    def load(program, **settings):
        browser.go("about:blank")
        fragment = urllib.parse.urlencode({"program": program, **settings})
        browser.go(f"{address}#{fragment}")
        browser.wait("return document.body.dataset.state !== undefined", seconds=180)
        return browser

    return load


@pytest.fixture
def shots(tmp_path):
    folder = Path(os.environ.get("ATTNDSL_SHOTS", tmp_path))
    folder.mkdir(exist_ok=True)
    return folder


def text_of(browser, id):  # noqa: A002
    return browser.run("return document.getElementById(arguments[0]).textContent", id)


def source(browser):
    return browser.run("return document.getElementById('picture').src")


def test_typing_changes_the_picture_and_all_that_follows(page):
    browser = page(PROGRAM)
    before = source(browser)
    browser.wait("return document.getElementById('kernel').textContent.includes('def ')")
    browser.wait("return document.getElementById('costs').rows.length > 1")
    assert "d score / d score = 1.0" in text_of(browser, "derivative")
    assert "forward: for q tile i" in text_of(browser, "loops")
    assert "work of dense attention" in text_of(browser, "cost")
    browser.type("#text", "\nscore = softcap(score, 5.0)")
    browser.wait("return document.getElementById('picture').src !== arguments[0]", before)
    browser.wait("return document.getElementById('curve').textContent.includes('->')")
    browser.wait("return document.getElementById('derivative').textContent.includes('tanh')")
    browser.wait("return document.getElementById('kernel').textContent.includes('tanh')")
    assert browser.run("return document.getElementById('picture').naturalWidth") > 600


def test_an_error_appears_under_the_text_at_its_place(page):
    browser = page(PROGRAM)
    good = source(browser)
    browser.type("#text", "\nmask = windw < 3 and foo > 1")
    browser.wait("return document.querySelectorAll('#problems li').length === 2")
    assert "'windw' is not declared" in text_of(browser, "problems")
    assert "Hint:" in text_of(browser, "problems")
    marks = "return [...document.querySelectorAll('#overlay mark')].map((m) => m.textContent)"
    assert browser.run(marks) == ["windw", "foo"]
    # The overlay holds the very text, so that marks are beside what they are about.
    assert browser.run(
        "return document.getElementById('overlay').textContent === "
        "document.getElementById('text').value + '\\n'"
    )
    # The last good picture is there, greyed out, and the page says so.
    assert browser.run("return document.getElementById('paper').classList.contains('old')")
    assert not browser.run("return document.getElementById('stale').hidden")
    assert browser.run("return document.getElementById('picture').naturalWidth") > 600
    assert source(browser) != "" and good.startswith("blob:")  # noqa: PT018
    browser.wait("return document.getElementById('status').textContent.startsWith('2 errors')")
    assert browser.run("return document.getElementById('status').getAttribute('aria-live')")
    # An error leads to its place, by the mouse and by the keyboard.
    browser.click("#problems button")
    selected = "const t = document.activeElement; " \
        "return t.value.slice(t.selectionStart, t.selectionEnd)"  # fmt: skip
    assert browser.run(selected) == "windw"
    browser.press("F8")
    assert browser.run(selected) == "foo"
    browser.press("SHIFT+F8")
    assert browser.run(selected) == "windw"


def test_script_in_a_program_is_text(page):
    hostile = "# <script>document.title = 'x'</script><img src=x onerror=\"document.title='x'\">\n"
    browser = page(f"{hostile}mask = q >= kv\nscore = <b>")
    browser.wait("return document.querySelectorAll('#problems li').length > 0")
    assert browser.run("return document.title") == "attndsl play"
    assert browser.run("return document.querySelectorAll('main b, main script').length") == 0
    browser = page(f"{hostile}mask = q >= kv")
    browser.wait(SETTLED)
    assert browser.run("return document.title") == "attndsl play"
    # Not even this browser's own tools may put a script into the page.
    assert browser.run(
        "const s = document.createElement('script'); s.textContent = 'document.title = 1'; "
        "document.body.append(s); return document.title"
    ) == "attndsl play"  # fmt: skip


def test_params_have_fields_that_appear_by_themselves(page):
    browser = page("q >= kv")
    assert browser.run("return document.getElementById('params-section').hidden")
    before = source(browser)
    browser.run("document.getElementById('text').select()")
    browser.type("#text", PROGRAM)
    browser.wait("return document.getElementById('param.w')")
    browser.wait("return document.getElementById('param.w').value === '20'")
    before = source(browser)
    browser.run(
        "const s = document.querySelector('.param input[type=range]'); s.value = 5; "
        "s.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    browser.wait("return document.getElementById('picture').src !== arguments[0]", before)
    assert browser.run("return document.getElementById('param.w').value") == "5"
    browser.wait("return location.hash.includes('param.w=5')")
    alt = browser.wait("return document.getElementById('picture').alt")
    browser.run("document.getElementById('text').focus()")
    browser.click("#reset")
    browser.wait("return document.getElementById('picture').alt !== arguments[0]", alt)
    browser.wait("return document.getElementById('param.w').value === '20'")


def test_tensors_are_made_up_and_the_page_says_so(page):
    browser = page("tensor doc[batch, kv_len]: int\nmask = doc[b, q] == doc[b, kv]")
    browser.wait(SETTLED)
    assert text_of(browser, "made-up") == "Made up, seed 0: doc (sorted ids)."


def test_a_link_restores_the_program_and_the_settings(page, browser, address):
    page(PROGRAM)
    browser.wait(SETTLED)
    for name, value in (("q_len", "96"), ("h", "3"), ("family", "hopper")):
        browser.run(
            "const e = document.getElementById(arguments[0]); e.value = arguments[1]; "
            "e.dispatchEvent(new Event('input', { bubbles: true }))", name, value
        )  # fmt: skip
    browser.devtools("Browser.grantPermissions", permissions=CLIPBOARD)
    browser.click("#link")
    browser.wait("return document.getElementById('toast').textContent === 'Copied the link.'")
    link = browser.run("return navigator.clipboard.readText()")
    assert link == browser.run("return location.href")
    browser.go("about:blank")
    browser.go(link)
    browser.wait("return document.body.dataset.state === 'right'", seconds=60)
    assert browser.run("return document.getElementById('text').value") == PROGRAM
    values = "return ['q_len', 'h', 'family'].map((id) => document.getElementById(id).value)"
    assert browser.run(values) == ["96", "3", "hopper"]
    browser.wait("return document.getElementById('picture').alt.includes('head 3 of 4')")


def test_copying(page):
    browser = page(PROGRAM)
    browser.devtools("Browser.grantPermissions", permissions=CLIPBOARD)
    browser.wait("return document.getElementById('kernel').textContent.includes('def ')")
    browser.wait("return document.getElementById('loops').textContent.includes('forward')")
    for id in ("text", "derivative", "loops", "kernel", "explanation"):  # noqa: A001
        browser.click(f"[data-copy={id}]")
        shown = "const e = document.getElementById(arguments[0]); return e.value ?? e.textContent"
        expected = browser.run(shown, id)
        assert expected
        read = "return navigator.clipboard.readText().then((text) => text === arguments[0])"
        browser.wait(read, expected)


def test_examples_and_format(page):
    browser = page("q >= kv")
    browser.run(
        "const e = document.getElementById('example'); e.value = '1'; "
        "e.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    browser.wait("return document.getElementById('text').value.includes('tensor doc')")
    browser.wait("return document.getElementById('picture').alt.includes('561 of 4096')")
    browser.run("document.getElementById('text').select()")
    browser.type("#text", "mask=q>=kv")
    browser.press("CONTROL+SHIFT+f")
    browser.wait("return document.getElementById('text').value === 'mask = q >= kv\\n'")
    # What formatting or an example replaced can be had back.
    browser.press("CONTROL+z")
    assert browser.run("return document.getElementById('text').value") == "mask=q>=kv"


def test_the_keyboard_is_not_trapped(page):
    browser = page("q >= kv")
    browser.run("document.getElementById('text').focus()")
    browser.press("TAB")
    assert browser.run("return document.getElementById('text').value.includes('    ')")
    active = "return document.activeElement.id"
    assert browser.run(active) == "text"
    browser.press("ESCAPE", "TAB")
    assert browser.run(active) != "text"
    browser.press("SHIFT+TAB")
    assert browser.run(active) == "text"
    browser.press("SHIFT+TAB")
    assert browser.run(active) != "text"


def test_every_field_has_a_name(page):
    browser = page(PROGRAM)
    browser.wait("return document.getElementById('param.w')")
    nameless = browser.run(
        "return [...document.querySelectorAll('input, select, textarea')]"
        ".filter((e) => !e.labels?.length && !e.ariaLabel).map((e) => e.id)"
    )
    assert nameless == []
    assert browser.run(
        "return [...document.querySelectorAll('button, a')].every((e) => e.textContent.trim())"
    )


CONTRAST = """
const light = (colour) => {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const ground = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (colour !== "rgba(0, 0, 0, 0)") return colour;
  }
  return "rgb(255, 255, 255)";
};
const low = [];
for (const e of document.querySelectorAll("body *")) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || e.closest("[hidden], noscript, option, .hidden, .skip, textarea")) continue;
  const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) low.push([e.tagName, e.className, e.textContent.slice(0, 20), ratio]);
}
return low;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_switch(page, scheme):
    browser = page(PROGRAM + "\nmask = foo < 3")
    other = "dark" if scheme == "light" else "light"
    ground = "return getComputedStyle(document.body).backgroundColor"
    browser.devtools(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    choose = (
        "const e = document.getElementById('theme'); e.value = arguments[0]; "
        "e.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    browser.run(choose, "")
    found = browser.run(ground)
    browser.wait("return document.querySelectorAll('#problems li').length > 0")
    assert browser.run(CONTRAST) == []
    browser.run(choose, other)
    assert browser.run(ground) != found
    assert browser.run("return localStorage.getItem('attndsl-theme')") == other
    browser.run(choose, scheme)
    assert browser.run(ground) == found
    browser.run(choose, "")


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_the_screen(page, shots, width, theme):
    browser = page(PROGRAM + "\nscore = softcap(score, 30.0)")
    browser.resize(width, 900)
    browser.run(
        "const e = document.getElementById('theme'); e.value = arguments[0]; "
        "e.dispatchEvent(new Event('input', { bubbles: true })); "
        "document.getElementById('call').open = innerWidth >= 1000", theme
    )  # fmt: skip
    browser.wait("return document.getElementById('kernel').textContent.includes('def ')")
    browser.wait("return document.getElementById('costs').rows.length > 1")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    beyond = browser.run(
        "return [...document.querySelectorAll('section, button, input, select, textarea')]"
        ".filter((e) => e.getBoundingClientRect().right > innerWidth).map((e) => e.id)"
    )
    assert beyond == []
    browser.screenshot(shots / f"{theme}-{width}.png")
    height = browser.run("return document.documentElement.scrollHeight")
    browser.resize(width, height)
    browser.screenshot(shots / f"{theme}-{width}-whole.png")
    browser.resize(1400, 1000)


def test_the_picture_of_the_documentation(browser, address, shots):
    """docs/play.png: what the page begins with."""
    browser.go("about:blank")
    browser.go(address)
    browser.resize(1400, 720)
    choose = (
        "const e = document.getElementById('theme'); e.value = arguments[0]; "
        "e.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    browser.run(choose, "light")
    browser.wait("return document.getElementById('kernel').textContent.includes('def ')")
    browser.wait("return document.getElementById('costs').rows.length > 1")
    browser.screenshot(shots / "play.png")
    assert (shots / "play.png").stat().st_size < 150_000
    browser.resize(1400, 1000)


def test_letters_and_marks_lie_upon_each_other(page):
    browser = page("\n".join(f"x{i} = q + {i}" for i in range(60)) + "\nmask = foo < 1")
    browser.wait("return document.querySelector('#overlay mark')")
    for id in ("text", "overlay"):  # noqa: A001
        found = browser.run(
            "const e = document.getElementById(arguments[0]), s = getComputedStyle(e); return "
            "[s.fontFamily, s.fontSize, s.lineHeight, s.padding, s.whiteSpace, s.tabSize, "
            "s.letterSpacing, s.borderTopWidth, e.getBoundingClientRect().top]", id
        )  # fmt: skip
        expected = found if id == "text" else expected  # noqa: F821
        assert found == expected
    browser.run("const t = document.getElementById('text'); t.scrollTop = 600; t.scrollLeft = 9")
    scrolled = "return document.getElementById('overlay').scrollTop === " \
        "document.getElementById('text').scrollTop"  # fmt: skip
    browser.wait(scrolled)
    assert browser.run("return document.getElementById('numbers').scrollTop") > 500


def test_a_hostile_program_does_not_block_the_page(page):
    browser = page(PROGRAM)
    browser.wait(SETTLED)
    long = "mask = " + " and ".join(
        f"strided({a}, {b})" for a in ("n1", "n2", "n3") for b in ("n4", "n5", "n6")
    )
    text = "\n".join(f"param n{i}: int = {i + 3}" for i in range(1, 7)) + "\n" + long
    for hostile in (text, "(" * 16384, "#" * 16384, "\N{GRINNING FACE}" * 8000):
        browser.run(
            "const t = document.getElementById('text'); t.value = arguments[0]; "
            "t.dispatchEvent(new Event('input', { bubbles: true }))", hostile
        )  # fmt: skip
        browser.wait("return new Promise((f) => setTimeout(() => f(true), 400))")
    before = source(browser)
    browser.run(
        "const t = document.getElementById('text'); t.value = 'q > kv'; "
        "t.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    browser.wait("return document.getElementById('picture').src !== arguments[0]", before)
    browser.wait("return document.getElementById('picture').alt.includes('2016 of 4096')")
    # What takes long, and was asked for, is answered too once that is gone.
    browser.wait("return document.getElementById('kernel').textContent.includes('def ')")


def test_sizes_out_of_bounds_are_said(page):
    browser = page(PROGRAM)
    browser.run(
        "const e = document.getElementById('q_len'); e.value = 4000; "
        "e.dispatchEvent(new Event('input', { bubbles: true }))"
    )
    browser.wait(
        "return document.getElementById('status').textContent.includes('Queries: give 1 to 1024')"
    )


LATENCY = """
return new Promise((finish) => {
  const area = document.getElementById("text"), image = document.getElementById("picture");
  const times = [], server = [];
  let begin = 0;
  performance.clearResourceTimings();
  performance.setResourceTimingBufferSize(1000);
  // The second frame after the picture is there has been painted with it.
  image.addEventListener("load", () => requestAnimationFrame(() => requestAnimationFrame(() => {
    if (begin) times.push(performance.now() - begin);
    begin = 0;
    setTimeout(step, 700);
  })));
  area.addEventListener("input", () => (begin = performance.now()), { capture: true });
  area.focus();
  area.setSelectionRange(area.value.length, area.value.length);
  function step() {
    if (times.length >= 30) {
      for (const entry of performance.getEntriesByType("resource")) {
        if (entry.name.endsWith("/answer")) {
          const found = entry.serverTiming.filter((part) => part.name === "picture");
          server.push(...found.map((part) => part.duration));
        }
      }
      finish({ times, server });
    } else {
      document.execCommand("insertText", false, times.length % 2 ? "1" : " + 0");
    }
  }
  step();
});
"""


def test_a_typed_character_has_its_picture_at_once(page, capsys):
    browser = page(PROGRAM)
    browser.wait("return document.getElementById('kernel').textContent.includes('def ')")
    found = browser.run(LATENCY)
    times = found["times"]
    assert len(times) == 30
    with capsys.disabled():
        print(
            f"\nfrom a character to its picture: median {statistics.median(times):.0f} ms, "
            f"worst {max(times):.0f} ms; the server's own: {statistics.median(found['server']):.0f}"
            f" ms, worst {max(found['server']):.0f} ms, of {len(times)}: "
            f"{' '.join(f'{x:.0f}' for x in times)}"
        )
    assert statistics.median(times) <= MOST_MEDIAN
    assert max(times) <= MOST_WORST
