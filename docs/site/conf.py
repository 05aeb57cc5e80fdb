"""Settings of the documentation site. `make docs`, or `python -m docs.site.build`, builds it; nothing is fetched."""

project = "trl-grpo-ext"
author = "The trl-grpo-ext developers"
copyright = "The trl-grpo-ext developers, Apache-2.0"  # the name is Sphinx's
html_title = "trl-grpo-ext"

extensions = ["myst_parser", "docs.site.mathml", "docs.site.source_pages"]
html_math_renderer = "mathml"

myst_heading_anchors = 4
myst_fence_as_directive = ["math"]
myst_links_external_new_tab = False

html_theme = "furo"
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options: dict[str, object] = {"top_of_page_buttons": []}
highlight_language = "text"  # what names no language is output
pygments_style = "friendly"
pygments_dark_style = "monokai"
