"""One HTML page that contains everything, and loads nothing from elsewhere.

Its only script sorts tables. Browsers run no other, whatever a run's name holds: the page names the
script's hash in its content security policy.
"""

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from longhaul.pipeline.reporting.caveats import unmeasured
from longhaul.pipeline.reporting.drawing import Figure, Table
from longhaul.pipeline.reporting.runs import Run
from longhaul.pipeline.reporting.variants import NamedRuns
from longhaul.pipeline.terminal.numbers import amount, in_bytes
from longhaul.pipeline.tracking.mlflow_limits import without_secrets

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto;
  max-width: 78rem; padding: 0 1rem; }
h1, h2 { line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
.wide { overflow-x: auto; margin-bottom: 1.5rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .3rem; border-bottom: 1px solid #ddd; text-align: right;
  vertical-align: top; }
td[data-value] { white-space: nowrap; }
th button { font: inherit; font-weight: bold; color: inherit; text-align: inherit; background: none;
  border: 0; padding: 0; cursor: pointer; }
th button::after { content: "\\2195"; color: #767676; padding-left: .2rem; }
th[aria-sort=ascending] button::after { content: "\\2191"; color: inherit; }
th[aria-sort=descending] button::after { content: "\\2193"; color: inherit; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
td:first-child, td:nth-child(2) { overflow-wrap: anywhere; min-width: 9rem; }
.caveat { font-size: 13px; margin: 0 0 .4rem; padding: .3rem .6rem; background: #fff3cd;
  border-left: 4px solid #b58900; }
tr.unfinished td { color: #555; font-style: italic; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr));
  gap: 1.5rem; align-items: start; }
figure { margin: 0; min-width: 0; } figure img { width: 100%; max-width: 30rem; height: auto; }
figcaption, .note { font-size: 13px; color: #333; }
pre { font-size: 12px; background: #f6f6f6; padding: .75rem; overflow-x: auto; }
summary { cursor: pointer; overflow-wrap: anywhere; }
/* On a phone, figures are as wide as their letters need to be read, and scroll like tables. */
@media (max-width: 40rem) {
  body { margin: 1rem auto; padding: 0 .75rem; }
  figure .wide img { width: 30rem; max-width: none; }
  .wide { margin-right: -.75rem; }
  td:first-child, td:nth-child(2) { min-width: 5rem; }
}
"""

# Cells sort by their number, if they have one, and otherwise by their text; empty ones are last.
_SCRIPT = """
for (const button of document.querySelectorAll("th button"))
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const falls = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const key = row => {
      const cell = row.cells[head.cellIndex];
      return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
    };
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      const order = typeof x === "number" && typeof y === "number"
        ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return falls ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  });
"""
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{_SCRIPT_HASH}'"
)

_LINE_ENDS = re.compile(r"(?<==)(?=\S{4})|(?<=_)(?=[a-z])")


def write_page(
    folder: Path,
    experiment: str,
    uri: str,
    named: NamedRuns,
    figures: Sequence[Figure],
    tables: Sequence[Table],
    left_out: Sequence[str],
) -> None:
    """Write index.html. The files of figures and tables must be in the folder already."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    shown_first = [table for table in tables if table.name.startswith("verdicts")]
    finished = sum(run.is_finished for run in named.runs)
    listed = "\n".join(f"<li>{escape(line)}</li>" for line in left_out)
    parts = [
        f"<h1>{escape(experiment)}</h1>",
        f"<p>{len(named.runs)} runs, {finished} finished, read from "
        f"{escape(without_secrets(uri))} on {when} by longhaul report.",
        "Unfinished runs have hollow markers and a label; their numbers are those so far.</p>",
        _caveats(unmeasured(named)),
        _section("What the seeds show", [_table(folder, table) for table in shown_first]),
        _section("Runs", [_runs(named)]),
        '<h2>Figures</h2>\n<div class="figures">',
        *(_figure(folder, figure) for figure in figures),
        "</div>",
        _section("Tables", [_table(folder, table) for table in tables if table not in shown_first]),
        _section("Left out", [f"<ul>\n{listed}\n</ul>"] if left_out else []),
        _section("Configs", [_config(run) for run in named.runs]),
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Otherwise browsers would ask the server for an icon.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(experiment)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    )
    page = head + "\n".join(parts) + f"\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    # Names may contain halves of surrogate pairs, which UTF-8 cannot encode.
    (folder / "index.html").write_bytes(page.encode(errors="replace"))


def _section(title: str, parts: Sequence[str]) -> str:
    return "\n".join([f"<h2>{title}</h2>", *parts]) if parts else ""


def _runs(named: NamedRuns) -> str:
    rows = []
    for run in named.runs:
        # The hash of a commit is cut to ten digits; -dirty behind it stays.
        commit = re.sub(r"(?<=^.{10})[0-9a-f]+", "", run.commit)
        cells = {
            "run": _text(run.name),
            "variant": _text(named.variant(run)),
            "status": _text(run.status.lower()),
            "training context": _number(run.context, "{:,}"),
            "learning rate": _number(run.config.optim.learning_rate, "{:g}"),
            "seed": _number(run.seed, "{}"),
            "tokens": _cell(amount(run.tokens), run.tokens),
            "validation loss (nats per token)": _number(run.final_loss, "{:.4f}"),
            "bits per byte": _number(run.bits_per_byte, "{:.3f}"),
            "tokens/s": _number(run.speed, "{:,.0f}"),
            "parameters": _cell(amount(run.num_parameters), run.num_parameters),
            "state": _cell(in_bytes(run.state_bytes), run.state_bytes),
            "commit": _text(commit),
        }
        css = "" if run.is_finished else ' class="unfinished"'
        rows.append(f"<tr{css}>{''.join(cells.values())}</tr>")
    note = (
        '<p class="note">Tokens: trained so far. Validation loss: the last one. Tokens/s: of all '
        "devices, median of all updates. Bits per byte: of the validation loss; runs with other "
        "tokenizers can be compared by it on one text. A dash: nobody has counted the bytes of a "
        "token, which longhaul evaluate RUN --tasks context does, or there is no loss. State: of "
        "one sequence, in half precision, after as many tokens as in training.</p>"
    )
    return note + _sortable("runs", [*cells], rows)


def _figure(folder: Path, figure: Figure) -> str:
    image = _data(folder / f"{figure.name}.png", "image/png")
    return (
        f'<figure id="{figure.name}">\n{_caveats(figure.caveats)}'
        f'<div class="wide"><img src="{image}" alt="{escape(figure.title)}: '
        f'{escape(figure.y_label)} against {escape(figure.x_label)}"></div>\n'
        f"<figcaption>{escape(figure.title)}. {escape(figure.caption)} "
        f"{_files(folder, figure.name, 'pdf', 'csv')}</figcaption>\n</figure>"
    )


def _table(folder: Path, table: Table) -> str:
    rows = [f"<tr>{''.join(map(_shown, row))}</tr>" for row in table.rows]
    return (
        f'<p class="note">{escape(table.title)}. {escape(table.caption)}. '
        f"{_files(folder, table.name, 'csv')}</p>{_caveats(table.caveats)}"
        + _sortable(table.name, table.columns, rows)
    )


def _caveats(caveats: Sequence[str]) -> str:
    return "".join(f'<p class="caveat">{escape(one)}</p>\n' for one in caveats)


def _sortable(name: str, columns: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th><button type="button">{escape(one)}</button></th>' for one in columns)
    body = "\n".join(rows)
    return (
        f'\n<div class="wide"><table id="{name}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _files(folder: Path, name: str, *suffixes: str) -> str:
    """Links that contain the files themselves, so that the page alone is enough."""
    kinds = {"pdf": "application/pdf", "csv": "text/csv"}
    return ", ".join(
        f'<a download="{name}.{suffix}" '
        f'href="{_data(folder / f"{name}.{suffix}", kinds[suffix])}">{suffix.upper()}</a>'
        for suffix in suffixes
    )


def _config(run: Run) -> str:
    return (
        f"<details><summary>{escape(run.name)} ({escape(run.run_id)})</summary>\n"
        f"<pre>{escape(without_secrets(run.config_text))}</pre></details>"
    )


def _data(file: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def _shown(value: str | int | float) -> str:
    if isinstance(value, str):
        return _text(value)
    return _number(value, "{:,}" if isinstance(value, int) else "{:,.4g}")


def _text(text: str) -> str:
    """A cell whose lines may end after = and _, so that no number is broken in two."""
    return f"<td>{'<wbr>'.join(map(escape, _LINE_ENDS.split(text)))}</td>"


def _number(value: float, form: str) -> str:
    return _cell(form.format(value), value) if math.isfinite(value) else _cell("\u2013", math.nan)


def _cell(text: str, value: float) -> str:
    """A cell that sorts by a number."""
    return f'<td data-value="{value}">{escape(text)}</td>'
