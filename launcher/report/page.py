"""The page: template, style, script, data and the bundled plotting library in one HTML file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from string import Template
from typing import Any

from launcher.formatting.pictures import VEGA_LITE, vega
from launcher.report.charts import Chart
from p2pfl.terminal import printable


def escape(text: object) -> str:
    """Return text as HTML. Everything that comes from a run passes here."""
    return html.escape(printable(str(text)), quote=True)


def prose(text: object) -> str:
    """Escape ``text``; a number and its percent sign stay on one line."""
    return escape(text).replace(" %", "\N{NO-BREAK SPACE}%")


@cache
def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as a script that needs nothing else.

    Raises:
        MissingExtra: vl-convert is not installed.
    """
    bundle: str = vega("p2pfl report").javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)
    return bundle.replace("</script", "<\\/script")


def _resource(name: str) -> str:
    return (resources.files("launcher.report") / "page" / name).read_text(encoding="utf-8")


def assemble(title: str, body: str, data: dict[str, Any]) -> str:
    """Return the page.

    Args:
        title: plain text.
        body: HTML.
        data: for the script; a block of JSON, which no browser executes.
    """
    scripts = [f"\n{library()}\n", f"\n{_resource('page.js')}"]
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    return Template(_resource("page.html")).substitute(
        title=escape(title),
        # Nothing may be requested, and no other script may run, whatever a peer has written into its records.
        policy=escape(
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
            "form-action 'none'"
        ),
        style=_resource("page.css"),
        body=body,
        data=as_json(data),
        library=scripts[0],
        script=scripts[1],
    )


def as_json(data: Any) -> str:
    """Return JSON that cannot end the script element that it is in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def document(heading: str, intro: str, sections: Mapping[str, tuple[str, str]], footer: str) -> str:
    """Return the body of a page.

    Args:
        heading, intro, footer: HTML.
        sections: title, as plain text, and HTML by key.
    """
    links = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, (title, _) in sections.items())
    main = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title">'
        f'<h2 id="{key}-title">{escape(title)}</h2>{content}</section>'
        for key, (title, content) in sections.items()
    )
    return (
        f'<a class="skip" href="#main">Skip to the report</a><header><h1>{heading}</h1><p class="quiet">{intro}</p>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f'<main id="main">{main}</main><footer><p>{footer}</p></footer>'
    )


def tiles(of: Iterable[tuple[str, str, str]]) -> str:
    """Return a row of boxes, each with a question, its answer, and more about it, as plain text."""
    boxes = "".join(
        f'<div><dt>{escape(question)}</dt><dd><span class="value">{prose(answer)}</span><br>'
        f'<span class="quiet">{prose(more)}</span></dd></div>'
        for question, answer, more in of
    )
    return f'<dl class="tiles">{boxes}</dl>'


def findings(of: Iterable[tuple[str, str]]) -> str:
    """Return a list of remarks, each with its level (good, look or bad), as plain text."""
    items = "".join(f'<li class="{escape(level)}">{prose(text)}</li>' for level, text in of)
    return f'<ul class="findings" aria-label="What stands out">{items}</ul>'


def figure(chart: Chart) -> str:
    """Return the place of a chart, with the controls that select among its variants."""
    return (
        f'<figure id="figure-{escape(chart.id)}" data-chart="{escape(chart.id)}">'
        f"{_variants(chart)}{_list(chart)}"
        f'<div class="chart" style="min-height:{chart.height or 280}px"></div>'
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
    )


def _variants(chart: Chart) -> str:
    if len(chart.variants) < 2:
        return ""
    buttons = "".join(
        f'<label><input type="radio" name="variant-{escape(chart.id)}" value="{k}"{" checked" if k == 0 else ""}>'
        f"<span>{escape(label)}</span></label>"
        for k, label in enumerate(chart.variants)
    )
    return f'<fieldset class="variants"><legend>{escape(chart.choice)}</legend>{buttons}</fieldset>'


def _list(chart: Chart) -> str:
    if chart.param is None or len(chart.param[2]) < 2:
        return ""
    name, label, values = chart.param
    return select(f"param-{chart.id}-{name}", label, values)


def select(key: str, label: str, values: dict[str, int]) -> str:
    """Return a labelled list to choose from."""
    options = "".join(f'<option value="{value}">{escape(text)}</option>' for text, value in values.items())
    return f'<label class="select">{escape(label)} <select id="{escape(key)}">{options}</select></label>'


def table(caption: str, head: list[str], rows: list[list[str]], *, key: str = "", sortable: bool = False) -> str:
    """Return a table in a box that scrolls by itself on a narrow screen; cells are plain text.

    A first column of text is left-aligned, columns of numbers are right-aligned by the style.
    """
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(text)}</button></th>'
        if sortable
        else f'<th scope="col">{escape(text)}</th>'
        for text in head
    )
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(c)}</td>" for c in row[1:]) + "</tr>"
        for row in rows
    )
    identity = f' id="{escape(key)}"' if key else ""
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table{identity}{kind}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
    )
