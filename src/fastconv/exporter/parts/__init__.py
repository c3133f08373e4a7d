"""The parts of exported files, as modules that tests can import.

The exporter writes their text, without docstrings and imports, one after the other into a file. So
they import nothing but the standard library, torch and each other, have no names in common, and do
without ``from __future__``, which some programs that run exported files do not allow.
"""
