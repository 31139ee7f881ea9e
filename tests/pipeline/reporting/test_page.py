"""The page of a report: what it holds, and what a browser makes of it."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from logged_runs import ATTENTION, EVIL, Page, Store
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.text import Text

from longhaul.pipeline.cli import main
from longhaul.pipeline.evaluation.figures import figure, legend_below
from longhaul.pipeline.reporting import page


def test_the_page_holds_everything_and_escapes_what_users_wrote(reported: Path) -> None:
    text = (reported / "index.html").read_text()
    parsed = Page(text)
    assert not parsed.open
    assert parsed.tags.count("script") == 1
    assert page._SCRIPT in parsed.texts
    assert parsed.tags.count("table") == 8
    # A browser runs this script only.
    digest = base64.b64encode(hashlib.sha256(page._SCRIPT.encode()).digest()).decode()
    assert f"script-src &#x27;sha256-{digest}&#x27;" in text
    assert "default-src &#x27;none&#x27;" in text
    assert parsed.tags.count("img") == len(list(reported.glob("*.png")))
    assert parsed.tags.count("details") == 5
    assert all(address.startswith("data:") for address in parsed.addresses)
    assert "url(" not in text
    assert "@import" not in text
    # The table of runs, two rows of scaled positions, two of scores, a bigram, two of lm-eval.
    assert parsed.texts.count(EVIL) == 1 + 2 + 2 + 1 + 2
    shown = "".join(parsed.texts)
    assert "running" in shown
    assert "secret" not in shown
    assert "  kind: conformal_sympow" in shown


def test_verdicts_stand_first_and_figures_of_single_points_last(reported: Path) -> None:
    text = (reported / "index.html").read_text()
    ends = [text.index(one) for one in ("<h2>What the", "<h2>Runs", "<h2>Figures")]
    assert ends == sorted(ends)
    names = re.findall(r'<figure id="(.*?)">', text)
    first = ("loss_against_tokens_000064", "loss_against_tokens_000128", "loss_in_windows_000064")
    assert tuple(names[:3]) == first
    single = {"gap_at_sequences", "gap_against_context"}
    single |= {"loss_against_state_000064", "loss_against_state_000128"}
    assert set(names[-4:]) == single


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("softmax, learning_rate=1e-05", "softmax, learning_<wbr>rate=<wbr>1e-05"),
        ("conformal_sympow p=2", "conformal_<wbr>sympow p=2"),
        ("<b>_<i>=", "&lt;b&gt;_&lt;i&gt;="),
    ],
)
def test_a_long_name_has_its_ends_of_lines_between_words(text: str, cell: str) -> None:
    assert page._text(text) == f"<td>{cell}</td>"


class Boxes(HTMLParser):
    """Which tables and figures lie in a box that scrolls, and which do not."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.outside: list[str] = []
        self.viewport = ""
        self._divisions: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "div":
            self._divisions.append(values.get("class") or "")
        elif tag == "meta" and values.get("name") == "viewport":
            self.viewport = values["content"] or ""
        elif tag in ("table", "img"):
            scrolls = self._divisions[-1:] == ["wide"]
            (self.inside if scrolls else self.outside).append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "div":
            self._divisions.pop()


def test_on_a_phone_what_is_wide_scrolls_and_letters_can_be_read(
    reported: Path, tmp_path: Path
) -> None:
    boxes = Boxes((reported / "index.html").read_text())
    assert "width=device-width" in boxes.viewport
    assert set(boxes.inside) == {"table", "img"}
    assert not boxes.outside
    everywhere, _, phone = page._STYLE.partition("@media (max-width: 40rem) {")
    assert re.search(r"^\.wide \{[^}]*overflow-x: auto", everywhere, re.MULTILINE)
    assert re.search(r"^pre \{[^}]*overflow-x: auto", everywhere, re.MULTILINE)
    (rem,) = re.findall(r"figure \.wide img \{ width: (\d+)rem; max-width: none; \}", phone)
    drawn: list[MatplotlibFigure] = []
    with figure(tmp_path / "a.png", "title") as axes:
        axes.plot([1, 2], label="a run")
        axes.set_xlabel("tokens")
        legend_below(axes, 1)
        drawn.append(axes.figure)
    sizes = [one.get_fontsize() for one in drawn[0].findobj(Text) if one.get_text()]
    # Points are 1/72 inch; a rem is 16 pixels of CSS.
    assert min(sizes) / 72 / drawn[0].get_figwidth() * 16 * int(rem) >= 12


def browse(page: Path, folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Open a page in Chromium, with a profile in the folder."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium")
    fixed = ("--headless", "--no-sandbox", f"--user-data-dir={folder / 'profile'}")
    return subprocess.run(
        [browser, *fixed, *options, f"file://{page}"], capture_output=True, text=True, timeout=120
    )


@pytest.mark.soak
def test_a_browser_has_no_complaint(reported: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    options = (f"--screenshot={picture}", "--window-size=1200,3000", "--enable-logging=stderr")
    result = browse(reported / "index.html", tmp_path, *options)
    assert picture.stat().st_size > 50_000, result.stderr
    assert not re.findall(r".*CONSOLE.*", result.stderr)


CLICKS = """
<script>
const runs = document.getElementById("runs"), orders = [];
for (const name of ["validation loss", "validation loss", "training context", "run", "tokens/s"]) {
  [...runs.querySelectorAll("button")].find(one => one.textContent.startsWith(name)).click();
  orders.push([...runs.tBodies[0].rows].map(row => row.cells[0].textContent));
}
document.title = JSON.stringify(orders);
</script>
"""


MEASURED = """
<script>
document.title = JSON.stringify([...document.querySelectorAll(".wide")]
  .map(one => one.scrollWidth - one.clientWidth));
</script>
"""


@pytest.mark.soak
def test_a_browser_shows_all_columns(
    empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longhaul.pipeline.reporting.folder._FIGURES", {})
    store, commit = Store.in_file(tmp_path, empty_store), f"{'4722a5cf86':0<40}-dirty"
    for rate in ("0.001", "0.002"):
        run_id = store.add(
            f"mine-learning_rate={rate}", f"optim.learning_rate={rate}", commit=commit
        )
        store.evaluate(run_id, "step-000000004", "attention", ATTENTION)
    assert main(["report", "tests", str(tmp_path / "new"), "--uri", store.uri]) == 0
    text = (tmp_path / "new" / "index.html").read_text()
    text = re.sub("<meta http-equiv=.*?>", "", text).replace("</body>", f"{MEASURED}</body>")
    (tmp_path / "page.html").write_text(text)
    # The letters of other machines are wider, so it fits into less than a desktop's 1,300 pixels.
    options = ("--dump-dom", "--window-size=1200,2000")
    shown = browse(tmp_path / "page.html", tmp_path, *options).stdout
    found = re.search("<title>(.*?)</title>", shown)
    assert found is not None
    assert set(json.loads(found[1])) == {0}


@pytest.mark.soak
def test_a_browser_sorts_the_table(reported: Path, tmp_path: Path) -> None:
    text = (reported / "index.html").read_text()
    # The page's policy would not let another script click.
    text = re.sub("<meta http-equiv=.*?>", "", text).replace("</body>", f"{CLICKS}</body>")
    (tmp_path / "page.html").write_text(text.replace(EVIL, "evil").replace(escape(EVIL), "evil"))
    shown = browse(tmp_path / "page.html", tmp_path, "--dump-dom").stdout
    found = re.search("<title>(.*?)</title>", shown)
    assert found is not None
    losses, falling, contexts, names, _ = json.loads(found[1])
    assert losses == ["longer", "flagship", "again", "evil", "cut off"]
    assert falling == losses[::-1]
    assert set(contexts[:3]) == {"evil", "flagship", "again"}
    assert names == ["again", "cut off", "evil", "flagship", "longer"]
