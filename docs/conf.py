"""How the documentation site is built: `make docs`. [021](design/021-documentation-site.md) says why so."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the package is imported, nothing is computed
sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from jax_trainer import __version__

project = "JAX-Trainer"
author = "the JAX-Trainer authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference"]
exclude_patterns = ["_build"]
nitpicky = True
# Signatures name types of other packages, whose inventories would have to be fetched, and types that are not public.
nitpick_ignore_regex = [("py:.*", r"(?!jax_trainer\.).*"), ("py:class", r"jax_trainer\..*")]

# Markdown
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# API: docstrings are Google style with `code` in single backticks
default_role = "code"
napoleon_numpy_docstring = False
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

# HTML: nothing is loaded from elsewhere
html_theme = "furo"
html_title = "JAX-Trainer"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
