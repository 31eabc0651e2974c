"""What the site is made of besides docs/: executed notebooks as pages, and documents of the root folder.

Nothing is run here: a notebook's page shows the outputs that are stored in it.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("CHANGELOG.md", "SECURITY.md")
_ROLE = re.compile(r":(?:meth|func|class|data|mod|attr):(?=<code>)")  # what Sphinx would make a link of


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every notebook, its pictures, and the root folder's documents."""
    for name in DOCUMENTS:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "tutorials").glob("*.ipynb")):
        for uri, content in pages(notebook).items():
            files.append(File.generated(config, f"tutorials/{uri}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """In the repository a link leads to the notebook or the root folder's document, here to its page."""
    return site_links(markdown)


def site_links(markdown: str) -> str:
    """Links as the site wants them.

    >>> site_links("[a](../tutorials/quickstart.ipynb#x) [b](../SECURITY.md)")
    '[a](tutorials/quickstart.md#x) [b](SECURITY.md)'
    >>> site_links("[c](../../tutorials/auditing.ipynb)")
    '[c](../tutorials/auditing.md)'
    """
    markdown = re.sub(r"\]\(\.\./((?:\.\./)?tutorials/\w+)\.ipynb", r"](\1.md", markdown)
    return re.sub(rf"\]\(\.\./({'|'.join(DOCUMENTS)})", r"](\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name other functions in Sphinx's way; readers want the name."""
    return _ROLE.sub("", html)


def pages(notebook: Path) -> dict[str, str | bytes]:
    """The page of a notebook as Markdown, and its pictures, by address."""
    lines: list[str] = []
    files: dict[str, str | bytes] = {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            lines.append(source)
            continue
        if source:
            lines.append(fenced(source, "python"))
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{notebook.stem}_{len(files) + 1}.png"
                files[name] = base64.b64decode(data["image/png"])
                lines.append(f"![a plot; the text above says what to look at]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).strip("\n"):
                lines.append(fenced(text, "text"))
    where = f"*This page is `tutorials/{notebook.name}`, as executed; `make tutorials` executes it again.*"
    title, _, rest = "\n\n".join(lines).partition("\n")
    files[f"{notebook.stem}.md"] = f"{title}\n\n{where}\n{rest}\n"
    return files


def fenced(text: str, language: str) -> str:
    """A code block; the fence is longer than any in the text."""
    return f"````{language}\n{text}\n````"
