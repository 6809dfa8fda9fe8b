"""The page in a browser, if one is installed: that it renders, fits a narrow screen, and has nothing to complain of."""

import io
import json
import os
import shutil
import subprocess
from html import escape, unescape

import pytest

from stochastic_attention import cli

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome")

# Around the untouched page, at the width of a telephone: reads what is laid out, and writes it where a dump shows it.
WRAPPER = """<!DOCTYPE html><title>wrapper</title><pre></pre>
<iframe style="width: 400px; height: 800px; border: 0" srcdoc="{page}"></iframe>
<script>
onload = () => {{
  const view = document.querySelector("iframe").contentWindow, page = view.document;
  const all = (selector, read) => [...page.querySelectorAll(selector)].map(read);
  document.querySelector("pre").textContent = JSON.stringify({{
    widths: [page.documentElement.scrollWidth, page.documentElement.clientWidth],
    headings: all("h1, h2, h3", x => x.innerText),
    cells: all("td", x => [x.innerText, view.getComputedStyle(x).textAlign]),
    pictures: all("img", x => [x.complete, x.naturalWidth, x.naturalHeight]),
    scrolling: all(".scroll", x => x.scrollWidth > x.clientWidth),
    hidden: all("details > :not(summary)", x => x.checkVisibility()),
  }});
  console.log("the wrapper ran");
}};
</script>
"""


def browse(folder, *options):
    """Run the browser, and return the standard output and what was said on the page's console."""
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", *options,
        ],
        capture_output=True, text=True, check=True, timeout=120, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture
def page(results, tmp_path):
    """The report on small results, with a table that is wider than a telephone."""
    wide = "".join(f"| column {i} " for i in range(12)) + "|\n" + "| -: " * 12 + "|\n" + "| 0.125 " * 12 + "|\n"
    (results / "notes.md").write_text(f"# Notes\n\n{wide}\n{'long' * 60}\n", encoding="utf-8")
    output = tmp_path / "report.html"
    assert cli.main(["report", str(results), "--output", str(output)]) == 0
    return output


def test_the_page_is_laid_out_and_fits_a_narrow_screen(page, tmp_path):
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(WRAPPER.format(page=escape(page.read_text(encoding="utf-8"))), encoding="utf-8")
    dump, said = browse(tmp_path, "--dump-dom", wrapper.as_uri())
    assert len(said) == 1, said
    assert "the wrapper ran" in said[0]
    found = json.loads(unescape(dump.partition("<pre>")[2].partition("</pre>")[0]))
    assert found["widths"] == [400, 400]
    assert found["headings"][:4] == ["Results in results", "Contents", "Speed and memory", "Speed: bench/cpu"]
    assert ["12.50", "right"] in found["cells"]
    assert ["over the budget", "left"] in found["cells"]
    assert found["pictures"] == [[True, 40, 20]]
    assert any(found["scrolling"])
    assert set(found["hidden"]) == {False}


@pytest.mark.parametrize(("scheme", "is_dark"), [(1, False), (0, True)], ids=["light", "dark"])
def test_the_page_is_drawn_in_light_and_dark(page, tmp_path, scheme, is_dark):
    image = pytest.importorskip("PIL.Image")
    shot = tmp_path / "shot.png"
    options = ("--window-size=800,1200", f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={shot}")
    _, said = browse(tmp_path, *options, page.as_uri())
    assert said == []
    grey = image.open(io.BytesIO(shot.read_bytes())).convert("L")
    counts = grey.histogram()
    background = counts.index(max(counts))
    assert (background < 128) == is_dark
    ink = sum(count for level, count in enumerate(counts) if abs(level - background) > 64)
    assert 0.01 < ink / sum(counts) < 0.5
