"""A matplotlib figure as SVG that can stand inside a page: text as text, colours of the page, ids of its own."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from .drawing import INK, style

_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"url\(#([^)]*)\)")
_FONTS = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"


def svg_of(figure: Figure, name: str, title: str) -> str:
    """The figure as one `<svg>` element, for a page of HTML.

    What is drawn in `INK` gets `currentColor`, the background is left out, and the size is that of the box around it.
    The text of names is escaped as XML has it; nothing in it is a script, a link or a style sheet. The name goes in
    front of every id, so that several figures can share a page; screen readers read the title out.
    """
    written = io.StringIO()
    with style():
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    root = ElementTree.fromstring(written.getvalue())
    for element in root.iter():
        for child in [child for child in element if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style")]:
            element.remove(child)
        _rewrite(element, name)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    attributes = {"role": "img", "aria-label": title, "font-family": _FONTS}
    root.attrib |= {**attributes, "stroke-linejoin": "round", "stroke-linecap": "butt"}  # what the style sheet said
    return ElementTree.tostring(root, encoding="unicode")


def _rewrite(element: ElementTree.Element, name: str) -> None:
    """One element's ids, references, colours, and its style as attributes, which no content security policy forbids."""
    for part in element.attrib.pop("style", "").split(";"):
        attribute, colon, value = part.partition(":")
        if colon and attribute.strip() != "font-family":
            element.set(attribute.strip(), value.strip())
    if "id" in element.attrib:
        element.set("id", f"{name}-{element.attrib['id']}")
    link = f"{{{_LINK}}}href"
    if element.get(link, "").startswith("#"):
        element.set(link, f"#{name}-{element.attrib[link][1:]}")
    for attribute, value in list(element.attrib.items()):
        if attribute in ("fill", "stroke", "clip-path"):
            element.set(attribute, _REFERENCE.sub(rf"url(#{name}-\1)", value).replace(INK, "currentColor"))
