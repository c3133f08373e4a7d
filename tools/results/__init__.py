"""Measures the project's results, and writes them down: ``python -m results --help``.

Each file of figures names the commit and the hash of the sources that it depends on. It is measured
again only if these have changed.
"""
