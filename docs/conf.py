"""Sphinx configuration."""

project = "fxsplit"
author = "The fxsplit authors"
html_title = "fxsplit"
html_show_copyright = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["wide.css"]
myst_heading_anchors = 3  # a link to errors.md#guarderror works here as it does in the repository

# Types stand beside the parameters that have a text, and nowhere else: not in the signature, not in lists of their own.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_custom_sections = [
    (title, "params_style") for title in ("Where to cut", "How to weigh", "Where to place", "How to run")
]
napoleon_use_ivar = True  # attributes of a class are a list, and no entries of their own

# Every reference has to lead somewhere, but for the classes of others and those that are no part of the reference.
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(torch|nn|os|collections|pathlib)\..*"),
    ("py:class", r"(LossFn|Compiled|Kept|DeviceMesh)"),
    ("py:class", r"fxsplit\.(simulation|schedules|compiled|weights|plan|graph|memory)\..*"),
]
