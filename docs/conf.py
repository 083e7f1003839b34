"""Sphinx configuration."""

project = "fxsplit"
author = "The fxsplit authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
autodoc_typehints = "description"
default_role = "code"
exclude_patterns = ["_build"]
nitpicky = False
