"""mkdocs' hooks: pictures of bench/results and docs/pictures in the pages, formulas, and the link to the repository.

Pages name pictures by their paths in the repository, and have formulas in TeX, in blocks ```math, so that they are also
seen there.
"""

from __future__ import annotations

import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PICTURE = re.compile(r"^!\[([^]]*)\]\((?:\.\./)*(?:docs/)?pictures/(\w+\.svg)\)$", re.MULTILINE)
FORMULA = re.compile(r"^```math\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
STYLE = re.compile(r"<style>.*?</style>\n?")


def on_config(config):
    """Take the repository's address from setup.py; while it is empty there is no link."""
    config.repo_url = re.search(r'^URL = "(.*)"$', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)[1]
    config.repo_name = "repository"
    config.edit_uri = ""
    return config


def on_files(files, config):
    """Add the pictures of bench/results, under results/."""
    for path in sorted((ROOT / "bench" / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Link to the copied pictures; put drawings into the page, in the colors of its scheme, with their captions, and
    formulas as MathML."""
    depth = page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+bench/results/(\w+\.png)\)", rf"]({'../' * depth}results/\1)", markdown)

    def inline(match):
        text = (ROOT / "docs" / "pictures" / match[2]).read_text(encoding="utf-8")
        return f"<figure>\n{STYLE.sub('', text)}<figcaption>{match[1]}</figcaption>\n</figure>"

    markdown = FORMULA.sub(
        lambda match: f"<figure class='math'>{convert(match[1], display='block')}</figure>", markdown
    )
    return PICTURE.sub(inline, markdown)
