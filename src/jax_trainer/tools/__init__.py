"""The command line, and what only it needs: reports, tuning, exporting, launching, pretrained models, new projects.

Nothing that trains imports a tool, except a method that is a shortcut to one, such as `result.report()`.
"""
