"""What exported files are made of, as modules of their own: tests import them as they are.

The exporter writes their text, without docstrings and imports, one after the other into a file. So
they import nothing but the standard library, torch and each other, have no names in common, and
need no ``from __future__``, which some harnesses that run exported files do not allow.
"""
