"""What pyproject.toml cannot say: the repository's address, the README for the package index, linked packages."""

import re

from setuptools import find_packages, setup

# Of the repository, once published, without a slash at its end. While it is empty, what needs it is left out: links and
# pictures on the package index, and the documentation's link to the repository (docs/hooks.py)
URL = ""


def for_the_index(text: str) -> str:
    """Return the README with absolute links. Without URL, replace relative links by their text and drop pictures."""
    picture, link = r"!\[([^]]*)\]\((?!https?:)([^)]+)\)\n*", r"\[([^]]*)\]\((?!https?:|#)([^)]+)\)"
    parts = text.split("```")
    for i in range(0, len(parts), 2):  # even parts are not code
        parts[i] = re.sub(picture, rf"![\1]({URL}/raw/main/\2)\n\n" if URL else "", parts[i])
        parts[i] = re.sub(link, rf"[\1]({URL}/blob/main/\2)" if URL else r"\1", parts[i])
    return "```".join(parts)


# Symbolic links in allscan/. find_packages would follow them, and in a checkout without symbolic links omit them
LINKED = "allscan.bindings", "allscan.bindings.interpreter", "allscan.shmem_kernels"

setup(
    long_description=for_the_index(open("README.md", encoding="utf-8").read()),
    long_description_content_type="text/markdown",
    project_urls={"Source": URL, "Changelog": f"{URL}/blob/main/CHANGELOG.md"} if URL else {},
    packages=[*find_packages(include=["allscan*"], exclude=[f"{name}*" for name in LINKED]), *LINKED],
    package_dir={name: name.partition(".")[2].replace(".", "/") for name in LINKED},
    package_data={"allscan": ["py.typed"]},
)
