"""Build the documentation site: `python -m docs.site.build [--out site]`. No network is needed, and a warning fails.

1. The pages are put together (`staging`), 2. the catalogue is written beside them (`catalogue`), 3. Sphinx makes HTML.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import build_main

from . import catalogue, staging

HERE = Path(__file__).parent


def build(out: Path, stage: Path) -> int:
    """Build into `out`, with `stage` to put things together in; Sphinx's exit status, 0 where nothing was wrong."""
    staging.stage(stage)
    sources = catalogue.write(stage)
    staging.close(stage)
    return build_main(
        [
            *("-b", "html", "-W", "--keep-going", "-q", "-E", "-c", str(HERE)),
            *("-D", f"html_static_path={HERE / 'static'}", "-d", str(stage.parent / "doctrees")),
            *(("-D", "source_files=" + ",".join(map(str, sources))) if sources else ()),
            *(str(stage), str(out)),
        ]
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--out", type=Path, default=staging.ROOT / "site", help="where the pages go (default: site)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        status = build(arguments.out, Path(folder) / "pages")
    if status == 0:
        print(f"The site is in {arguments.out}; open {arguments.out / 'index.html'} in a browser.")
    return status


if __name__ == "__main__":
    sys.exit(main())
